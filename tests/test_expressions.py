"""Arithmetic over a model's config: what it gives, what it misses, and what is not part of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicap import expressions

CONFIG = {
    "a": 7,
    "b": 3,
    "none": None,
    "zero": 0,
    "layer": 1,
    "kinds": ["x", "y"],
    "nested": {"c": 5, "deep": {"d": [2, 4]}},
    "text": "seven",
}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + b", 10),
        ("a - b * 2", 1),
        ("a // b", 2),
        ("a % b", 1),
        ("zero", 0),
        ("nested.c", 5),
        ("kinds[layer] == 'y'", True),
        ("kinds[layer] != 'y'", False),
        ("layer + 1 in nested.deep.d", True),
        ("a in nested.deep.d", False),
        ("not a < b", True),
        ("a > b and a >= 7 and b <= 3", True),
        ("a < b or b == 3", True),
        ("True", True),
    ],
)
def test_what_an_expression_gives(expression, expected):
    assert expressions.check(expression) is None
    assert expressions.evaluate(expression, CONFIG) == expected


@given(a=st.integers(-50, 50), b=st.integers(1, 50), c=st.integers(-50, 50))
def test_precedence_is_pythons(a, b, c):
    for text in ("a + b * c", "(a + b) * c", "a // b - c % b", "a * b == c or a < c and not b > c"):
        assert expressions.evaluate(text, {"a": a, "b": b, "c": c}) == eval(text)


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ("c", "c"),
        ("none", "none"),
        ("a + gone", "gone"),
        ("nested.gone", "nested.gone"),
        ("a.c", "a.c"),
        ("gone.c", "gone"),
        ("kinds[a]", r"fitting values for kinds\[a\]"),
        ("a + text", r"fitting values for a \+ text"),
        ("layer in a", "fitting values for layer in a"),
        ("a % zero", "fitting values for a % zero"),
    ],
)
def test_what_a_config_lacks(expression, missing):
    with pytest.raises(expressions.MissingKey, match=f"^{missing}$"):
        expressions.evaluate(expression, CONFIG)


def test_of_several_the_first_with_all_its_keys_holds():
    assert expressions.first(["gone", "a", "b"], CONFIG) == 7
    assert expressions.first(["kinds[a] == 'x'", "b"], CONFIG) == 3
    with pytest.raises(expressions.MissingKey, match=r"^gone or none$"):
        expressions.first(["gone", "gone * 2", "none"], CONFIG)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("a +", "cannot be read (invalid syntax)"),
        ("", "cannot be read (invalid syntax)"),
        ("f(a)", "uses Call, which is not part of this notation"),
        ("a if b else a", "uses IfExp, which is not part of this notation"),
        ("-a", "uses USub, which is not part of this notation"),
        ("a ** 9", "uses Pow, which is not part of this notation"),
        ("a < b < 3", "uses Compare, which is not part of this notation"),
        ("kinds[0:1]", "uses Slice, which is not part of this notation"),
        ("[a for a in kinds]", "uses ListComp, which is not part of this notation"),
        ("lambda: 1", "uses Lambda, which is not part of this notation"),
    ],
)
def test_what_is_not_part_of_the_notation(expression, problem):
    assert expressions.check(expression) == problem


@given(st.text(max_size=20))
def test_any_text_gets_an_answer(text):
    problem = expressions.check(text)
    assert problem is None or problem
