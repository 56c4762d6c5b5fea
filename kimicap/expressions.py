"""Small arithmetic over the keys of a model's config, as schema.yaml writes sizes and blocks.

An expression is Python's own notation, cut down to names (dotted for nested keys), constants,
``+ - * // %``, comparisons, ``in``, ``and or not`` and one subscript: ``layer_types[layer] == 'linear_attention'``.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
}


class MissingKey(Exception):
    """The config lacks a key that an expression needs, or holds null or something else than a fitting value there."""


def check(expression: str) -> str | None:
    """What is wrong with the expression's notation, or None."""
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError) as error:
        return f"cannot be read ({error.msg if isinstance(error, SyntaxError) else error})"
    allowed: tuple[type[ast.AST], ...] = (ast.Expression, ast.Name, ast.Attribute, ast.Constant, ast.Subscript)
    allowed += (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Not, ast.And, ast.Or, ast.Compare, ast.Load, *_BINARY)
    for node in ast.walk(tree):
        if not isinstance(node, allowed) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
            return f"uses {type(node).__name__}, which is not part of this notation"
    return None


def evaluate(expression: str, config: Mapping[str, Any]) -> Any:
    """The expression's value over ``config``.

    Raises:
        MissingKey: A key is not there, holds null, or holds something of another kind or length than is needed.
    """
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, config)
    except (TypeError, LookupError, ArithmeticError):
        raise MissingKey(f"fitting values for {expression}") from None


def first(expressions: Sequence[str], config: Mapping[str, Any]) -> Any:
    """The value of the first expression whose keys are all in ``config``.

    Raises:
        MissingKey: None has them all.
    """
    missing: list[str] = []
    for expression in expressions:
        try:
            return evaluate(expression, config)
        except MissingKey as error:
            missing.append(str(error))
    raise MissingKey(" or ".join(dict.fromkeys(missing)))


def _evaluate(node: ast.AST, config: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _key(config, node.id, node.id)
    if isinstance(node, ast.Attribute):
        return _key(_evaluate(node.value, config), node.attr, ast.unparse(node))
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, config)[_evaluate(node.slice, config)]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left, config), _evaluate(node.right, config))
    if isinstance(node, ast.Compare):
        left, right = _evaluate(node.left, config), _evaluate(node.comparators[0], config)
        return _BINARY[type(node.ops[0])](left, right)
    if isinstance(node, ast.BoolOp):
        parts = (_evaluate(part, config) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    assert isinstance(node, ast.UnaryOp), ast.dump(node)
    return not _evaluate(node.operand, config)


def _key(config: Any, key: str, path: str) -> Any:
    value = config.get(key) if isinstance(config, Mapping) else None
    if value is None:
        raise MissingKey(path)
    return value
