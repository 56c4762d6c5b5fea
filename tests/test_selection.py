"""What people type after --values, --layers and --heads."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicap.errors import UsageError
from kimicap.schema import load_schema
from kimicap.selection import Positions, parse_numbers, parse_values, position_axis, split_values

SCHEMA = load_schema()


def parsed(*text):
    return [
        (request.value.key, str(request.positions), request.layers, request.heads, request.top)
        for request in parse_values(text, SCHEMA)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("router_logits", [("mlp.router_logits", "all", None, None, None)]),
        ("residuals", [("layers.layer_output", "all", None, None, None)]),
        ("patterns", [("self_attn.attention_probabilities", "all", None, None, None)]),
        ("states", [("linear_attn.states", "every:64", None, None, None)]),
        ("states@every:5", [("linear_attn.states", "every:5", None, None, None)]),
        ("states@all", [("linear_attn.states", "all", None, None, None)]),
        ("states@last", [("linear_attn.states", "last", None, None, None)]),
        ("layer_output@0:128", [("layers.layer_output", "0:128", None, None, None)]),
        ("layer_output@:9", [("layers.layer_output", "0:9", None, None, None)]),
        ("patterns@last", [("self_attn.attention_probabilities", "last", None, None, None)]),
        ("states@last@layers:0,4", [("linear_attn.states", "last", "0,4", None, None)]),
        ("states@layers:0,4-6,-1@last", [("linear_attn.states", "last", "0,4-6,-1", None, None)]),
        ("betas@heads:0-3, 8@1:2", [("linear_attn.betas", "1:2", None, "0-3,8", None)]),
        ("logits@top:20", [("model.logits", "all", None, None, 20)]),
        ("logits@top:20@last", [("model.logits", "last", None, None, 20)]),
        (
            "states@layers:0,4,betas@heads:1,2 , decays",
            [
                ("linear_attn.states", "every:64", "0,4", None, None),
                ("linear_attn.betas", "all", None, "1,2", None),
                ("linear_attn.decays", "all", None, None, None),
            ],
        ),
    ],
)
def test_every_form(text, expected):
    assert parsed(text) == expected


def test_a_bare_name_means_every_host_that_owns_it_and_a_dotted_one_means_one():
    both = parse_values(["attention_queries"], SCHEMA)
    assert [request.value.key for request in both] == ["linear_attn.attention_queries", "self_attn.attention_queries"]
    assert not any(request.dotted for request in both)
    (one,) = parse_values(["self_attn.attention_queries"], SCHEMA)
    assert one.value.host == "self_attn"
    assert one.dotted
    assert parse_values(["residuals"], SCHEMA)[0].dotted


def test_numbers_after_a_comma_belong_to_the_line_they_stand_in():
    assert split_values(["a@layers:0,4", "5"]) == ["a@layers:0,4", "5"]
    assert split_values(["a,b , c,", "", "d@last,e"]) == ["a", "b", "c", "d@last", "e"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stats", "No value is called 'stats'. Did you mean states"),
        ("linear_attn.router_logits", "No value is called 'linear_attn.router_logits'. Did you mean"),
        ("zzz", "No value is called 'zzz'. `kimicap values` lists them all."),
        ("residuals,layer_output", "layers.layer_output is asked for twice; name each value once"),
        ("betas,attention_keys,self_attn.attention_keys", "self_attn.attention_keys is asked for twice"),
        ("", "No values are asked for; name some with --values"),
        (" , ", "No values are asked for"),
        ("states@evry:64", "The selection @evry:64 in 'states@evry:64' is not known; use all, last, every:N,"),
        ("states@", "The selection @ in 'states@' is not known"),
        ("states@LAST", "The selection @LAST"),
        ("states@every:0", "'states@every:0' needs a whole number from 1 to 999999999 where it says '0'."),
        ("states@every:", "needs a whole number from 1 to 999999999 where it says ''."),
        ("states@every:1.5", "where it says '1.5'."),
        ("states@every:1234567890123", "from 1 to 999999999 where it says '1234567890123'."),
        ("states@every", "The selection @every in"),
        ("states@-4:2", "The selection @-4:2 in"),
        ("states@4:", "'states@4:' needs a whole number"),
        ("states@4:4", "The range in 'states@4:4' is empty; write first:stop with first below stop."),
        ("states@9:4", "The range in 'states@9:4' is empty"),
        ("states@every:64@last", "'states@every:64@last' selects positions twice; write one selection of positions."),
        ("states@all@0:4", "selects positions twice"),
        ("states@layers:0@layers:1", "selects layers twice; write one selection of layers."),
        ("betas@heads:0@heads:1", "selects heads twice"),
        ("logits@top:1@top:2", "selects top twice"),
        ("states@layers:", "'states@layers:' needs numbers after @layers:, like @layers:0-3,8."),
        ("betas@heads", "needs numbers after @heads:"),
        ("logits@layers:0", "'logits@layers:0' narrows layers, but model.logits belongs to the whole model; drop"),
        ("router_logits@heads:0", "narrows heads, but mlp.router_logits has none; drop @heads."),
        ("state_output@last", "narrows positions, but linear_attn.state_output has none; drop @last."),
        ("next_token_probs@top:4", "asks for the largest of a vocabulary; only logits and lm_head_output have one."),
        ("router_logits@top:4", "asks for the largest of a vocabulary"),
        ("logits@top:0", "needs a whole number from 1"),
        ("logits@top", "needs a whole number from 1"),
    ],
)
def test_what_cannot_be_read(text, sentence):
    with pytest.raises(UsageError) as failure:
        parse_values([text], SCHEMA)
    assert sentence in str(failure.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8,-1", (0, 1, 2, 3, 8, 9)),
        ("3", (3,)),
        ("-1", (9,)),
        ("-3--1", (7, 8, 9)),
        ("8--1", (8, 9)),
        ("0--1", tuple(range(10))),
        (" 4 , 2,2-3", (2, 3, 4)),
    ],
)
def test_numbers(text, expected):
    assert parse_numbers(text, 10, what="--layers") == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("10", "--layers 10 lies outside the model, which has 0 to 9."),
        ("-11", "--layers -11 lies outside the model, which has 0 to 9."),
        ("0-10", "--layers 0-10 lies outside the model"),
        ("3-1", "--layers 3-1 runs backwards; write the smaller number first."),
        ("-1-3", "--layers -1-3 runs backwards"),
        (
            "a",
            "--layers 'a' cannot be read at 'a'; write numbers and ranges like 0-3,8,-1, where negative numbers count",
        ),
        ("1,,2", "cannot be read at ''"),
        ("1:2", "cannot be read at '1:2'"),
        ("1" * 5000, "cannot be read at"),
        ("", "cannot be read at ''"),
    ],
)
def test_numbers_that_do_not_fit(text, sentence):
    with pytest.raises(UsageError) as failure:
        parse_numbers(text, 10, what="--layers")
    assert sentence in str(failure.value)


POSITIONS = st.one_of(
    st.just(Positions()),
    st.just(Positions(kind="last")),
    st.builds(lambda step: Positions(kind="every", step=step), st.integers(1, 50)),
    st.builds(
        lambda start, more: Positions(kind="range", start=start, stop=start + more),
        st.integers(0, 45),
        st.integers(1, 30),
    ),
)


def chosen_by_hand(positions: Positions, length: int) -> list[int]:
    """Positions read of a sequence, by what cli.md says, one token at a time."""
    if positions.kind == "last":
        return [length - 1]
    if positions.kind == "every":
        return [t for t in range(length) if (t + 1) % positions.step == 0]
    if positions.kind == "range":
        return [t for t in range(length) if positions.start <= t < positions.stop]
    return list(range(length))


@given(positions=POSITIONS, length=st.integers(1, 60), longer=st.integers(0, 20))
def test_the_axis_holds_the_chosen_ones_in_order(positions, length, longer):
    chosen = chosen_by_hand(positions, length)
    slots = positions.slots(length + longer)
    assert positions.slots(length) == len(chosen)
    at = positions.at(length, slots)
    assert at.dtype == np.int32
    assert at.tolist() == chosen + [-1] * (slots - len(chosen))


@given(positions=POSITIONS, length=st.integers(1, 60), data=st.data())
def test_windows_of_a_cut_sequence_give_each_chosen_one_once_in_its_slot(positions, length, data):
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    chosen = chosen_by_hand(positions, length)
    found: dict[int, int] = {}
    for past, end in pairwise(cuts):
        offset, number, slot = positions.window(past, end - past, length)
        for index in range(number):
            token = past + offset + index * positions.step
            assert past <= token < end
            assert found.setdefault(slot + index, token) == token
    assert found == dict(enumerate(chosen))


def test_the_axis_that_a_selection_narrows():
    assert position_axis(SCHEMA.values["mlp.router_logits"]) == "position"
    assert position_axis(SCHEMA.values["self_attn.attention_scores"]) == "query"
    assert position_axis(SCHEMA.values["linear_attn.state_output"]) is None
