"""A model's sizes and parts, read off its config by the schema's expressions; no weights, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimicap import expressions
from kimicap.errors import UsageError
from kimicap.schema import Family, Match, Schema, Site, Value
from kimicap.selection import Request, parse_numbers


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What of a family one config describes.

    Attributes:
        match: Which of the family's kinds of model it is.
        layers: Number of blocks.
        blocks: Block numbers that have each part, by the part's name; empty for a part outside the blocks.
        config: The config the sizes are read from.
    """

    family: Family
    match: Match
    layers: int
    blocks: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]

    def size(self, host: str, dim: str) -> int:
        """Elements of a dimension in the arrays of a host.

        Raises:
            UsageError: The family says no size for it.
        """
        sizes = self.family.sizes
        expression = sizes.get(f"{host}.{dim}", sizes.get(dim))
        if expression is None:
            raise UsageError(
                f"The family {self.family.name} has no size for the dimension {dim} of {host}; add {host}.{dim} "
                "to its sizes in the schema."
            )
        return _whole(expression, self.config, least=0)

    def value(self, value: Value) -> Value:
        """The value with the layout and the description that this family's site gives it, where it gives any."""
        for site in self.sites(value):
            value = replace(value, layout=site.layout or value.layout, about=site.about or value.about)
        return value

    def sites(self, value: Value) -> list[Site]:
        """The value's sites in parts that this model has."""
        return [site for site in self.family.sites_of(value) if value.host == "model" or self.blocks[site.part]]

    def blocks_of(self, value: Value) -> tuple[int, ...]:
        """Numbers of the blocks in which the value exists, ascending; empty for values of the whole model."""
        return tuple(sorted(block for site in self.sites(value) for block in self.blocks[site.part]))

    def why_missing(self, value: Value) -> str | None:
        """Why this model does not have the value, or None if it has."""
        if not self.family.sites_of(value):
            return f"the schema has no site for it in the family {self.family.name}"
        if not self.sites(value):
            parts = " or ".join(part.name for part in self.family.parts.values() if part.host == value.host)
            return f"no block of this model has a part of the kind {parts}"
        return None


def read_architecture(family: Family, config: Mapping[str, Any]) -> Architecture:
    """The architecture that ``config`` describes.

    Raises:
        expressions.MissingKey: The config leaves out a key that the family's sizes or blocks need, or holds no fitting
            number there.
    """
    matches = [match for match in family.matches if match.model_type == config.get("model_type")] or family.matches
    match = matches[0]
    if match.config is not None:
        if not isinstance(config.get(match.config), Mapping):
            raise expressions.MissingKey(match.config)
        config = config[match.config]
    layers = _whole(family.layers, config, least=1)
    blocks = {
        name: tuple(
            layer
            for layer in range(layers)
            if part.blocks and expressions.first(part.blocks, {**config, "layer": layer})
        )
        for name, part in family.parts.items()
    }
    for expression in family.sizes.values():
        _whole(expression, config, least=0)
    return Architecture(family=family, match=match, layers=layers, blocks=blocks, config=config)


def _whole(expression: Sequence[str], config: Mapping[str, Any], *, least: int) -> int:
    """The whole number that the config gives for a size.

    Raises:
        expressions.MissingKey: The config leaves out a key, or holds something else or less there.
    """
    found = expressions.first(expression, config)
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise expressions.MissingKey(f"a whole number of at least {least} for {' or '.join(expression)}")
    return found


def family_of_config(schema: Schema, config: Mapping[str, Any], *, code: str | None, model: str) -> Family:
    """The family whose models have such a config.

    Args:
        code: Name of the checkpoint's own modelling file, if that will be used.

    Raises:
        UsageError: None has.
    """
    model_type = config.get("model_type")
    alike = [(family, m) for family in schema.families.values() for m in family.matches if m.model_type == model_type]
    for family, match in alike:
        if match.code == code:
            return family
    if alike and code is None:
        raise UsageError(
            f"The model {model} has model_type {model_type!r}, which kimicap knows by its checkpoint's own code; add "
            "--trust-remote-code."
        )
    known = ", ".join(
        f"{family.name} (model_type {match.model_type}{f' by {match.code}.py' if match.code else ''})"
        for family in schema.families.values()
        for match in family.matches
    )
    hint = f"loaded by its checkpoint's own {code}.py" if code else "in transformers' own code"
    raise UsageError(
        f"The model {model} has model_type {model_type!r} {hint}, which no family of the schema covers: {known}. "
        "Choose a model of one of these, or add a family with --schema."
    )


@dataclass(frozen=True, kw_only=True)
class Want:
    """A request, resolved against one model.

    Attributes:
        blocks: Numbers of the blocks in which the value exists and is wanted; empty for values of the whole model.
        heads: Heads wanted, or None for all.
    """

    request: Request
    blocks: tuple[int, ...]
    heads: tuple[int, ...] | None

    @property
    def value(self) -> Value:
        """The value wanted."""
        return self.request.value


def resolve(
    architecture: Architecture, requests: Sequence[Request], *, layers: str | None = None, heads: str | None = None
) -> list[Want]:
    """The requests as wants of one model. Values that every capture has anyway are passed over.

    Args:
        architecture: The model's parts and sizes.
        requests: What was asked for.
        layers: Blocks of all values that say none of their own, as ``--layers`` writes them.
        heads: Likewise heads.

    Raises:
        UsageError: A value the model lacks, or a selection outside it or that leaves nothing.
    """
    requests = [replace(request, value=architecture.value(request.value)) for request in requests]
    wants = []
    for request in requests:
        value = request.value
        why = architecture.why_missing(value)
        if why:
            raise UsageError(f"This model has no {value.key}: {why}. `kimicap values --model ...` lists what it has.")
        if any(site.batch is not None for site in architecture.sites(value)):
            if request.positions.kind != "all":
                raise UsageError(f"{value.name} is whole in every capture; drop @{request.positions}.")
        elif value.host == "model":
            _check_top(architecture, request)
            wants.append(Want(request=request, blocks=(), heads=None))
        else:
            blocks = _blocks(architecture, request, layers)
            if not blocks and not _named_elsewhere(architecture, request, requests, layers):
                raise UsageError(_none_left(architecture, request, layers))
            if blocks:
                wants.append(Want(request=request, blocks=blocks, heads=_heads(architecture, request, heads)))
    return wants


def _blocks(architecture: Architecture, request: Request, layers: str | None) -> tuple[int, ...]:
    """Blocks that have the value and are chosen."""
    text, what = _layers_text(request, layers)
    blocks = architecture.blocks_of(request.value)
    if text is None:
        return blocks
    chosen = parse_numbers(text, architecture.layers, what=what)
    return tuple(block for block in blocks if block in chosen)


def _layers_text(request: Request, layers: str | None) -> tuple[str | None, str]:
    """The blocks as written, and where."""
    return (layers, "--layers") if request.layers is None else (request.layers, f"{request.value.name}@layers")


def _named_elsewhere(
    architecture: Architecture, request: Request, requests: Sequence[Request], layers: str | None
) -> bool:
    """Whether a bare name means another host's value too, of which some blocks are chosen."""
    return not request.dotted and any(
        other.value.name == request.value.name and not other.dotted and _blocks(architecture, other, layers)
        for other in requests
    )


def _none_left(architecture: Architecture, request: Request, layers: str | None) -> str:
    text, what = _layers_text(request, layers)
    return (
        f"{what}{' ' if request.layers is None else ':'}{text} holds no {request.value.key}; it exists in "
        f"{ranges(architecture.blocks_of(request.value))}. Choose among these."
    )


def _check_top(architecture: Architecture, request: Request) -> None:
    if request.top is not None and request.top > (size := architecture.size("model", "vocab")):
        raise UsageError(
            f"{request.value.name}@top:{request.top} asks for more than the vocabulary of {size}; choose fewer."
        )


def _heads(architecture: Architecture, request: Request, heads: str | None) -> tuple[int, ...] | None:
    text, what = (heads, "--heads") if request.heads is None else (request.heads, f"{request.value.name}@heads")
    if "head" not in request.value.layout or text is None:
        return None
    return parse_numbers(text, architecture.size(request.value.host, "head"), what=what)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers written as ``0-2,4``."""
    parts: list[str] = []
    for number in numbers:
        if parts and number == int(parts[-1].split("-")[-1]) + 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{number}"
        else:
            parts.append(str(number))
    return ",".join(parts)
