"""Faults that other tools had, put into kimicap one at a time: what finds each of them must go on finding it.

The finders are the comparison with the oracle (``tests.test_values``) and `kimicap check`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kimicap import attention, computed, kda
from kimicap.check import check_model
from kimicap.errors import UsageError
from kimicap.forwards import Decoding, Runner
from kimicap.hooks import Recorder
from kimicap.pieces import Piece
from kimicap.rows import Rows
from kimicap.schema import load_schema
from kimicap.selection import Positions
from tests.capturing import all_values, architecture, capture_decoded, capture_prompts, wants
from tests.models import tiny_model
from tests.oracle import reference
from tests.test_values import check_against_oracle

ROWS = [[7, 5, 300, 41, 9, 9, 12], list(range(3, 43)), list(range(100, 117))]
DECODING = Decoding(tokens=3, forced=False, temperature=0.0, seed=0, stop=())


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def oracle_finds(model, *, decode=False) -> bool:
    """Whether prompts (or a decoded batch) differ from the oracle of each row alone."""
    try:
        if decode:
            captured, rows = capture_decoded(model, ROWS, tokens=3)
        else:
            captured, rows = capture_prompts(model, ROWS), ROWS
        check_against_oracle(model, captured, rows)
    except AssertionError:
        return True
    return False


def check_finds(model, values=None, *, decode=False, found=None) -> set[str]:
    """Names of the checks that fail."""
    found = found or architecture(model)
    rows = [np.asarray(row, np.int32) for row in ROWS]
    wanted = wants(found, values or all_values(found))
    checks = check_model(model, found, load_schema(), wanted, rows, decoding=DECODING if decode else None)
    return {one.name for one in checks if not one.passed}


def reads(monkeypatch, name: str, change: Callable[[torch.Tensor, int | None], torch.Tensor]) -> None:
    """Every value of this name is changed where it is read."""
    original = Recorder._read

    def read(self, site, block, raw, where):
        original(self, site, block, change(raw, block) if site.name == name else raw, where)

    monkeypatch.setattr(Recorder, "_read", read)


def gives(monkeypatch, change: Callable[[str, Piece], torch.Tensor]) -> None:
    """Every piece is changed as it is handed over."""
    original = Recorder._give

    def give(self, key, block, piece, suffix=""):
        original(self, key, block, dataclasses.replace(piece, tensor=change(key, piece)), suffix)

    monkeypatch.setattr(Recorder, "_give", give)


def test_without_a_fault_nothing_is_found(model):
    assert not oracle_finds(model)
    assert not oracle_finds(model, decode=True)
    assert check_finds(model, decode=True) == set()


def test_a_row_begins_one_token_late(model, monkeypatch):
    original = Rows.of_prompts

    def late(lengths, **more):
        rows = original(lengths, **more)
        return dataclasses.replace(
            rows, starts=tuple(min(s + 1, rows.width_tokens - c) for s, c in zip(rows.starts, rows.counts, strict=True))
        )

    monkeypatch.setattr(Rows, "of_prompts", staticmethod(late))
    assert oracle_finds(model)
    assert "row_alone" in check_finds(model)


def test_the_padding_runs_through_the_final_state(model, monkeypatch):
    def padded(want, rows, *, returned, **factors):
        for row in range(len(rows.counts)):
            yield Piece(row=row, tensor=returned[row])

    monkeypatch.setitem(computed.FUNCTIONS, "final_state", padded)
    assert oracle_finds(model)
    assert {"final_replay", "row_alone"} <= check_finds(model, ["state_output"])


def test_the_padding_mask_is_skipped(model, monkeypatch):
    original = Runner._forward

    def unmasked(self, module, ids, *, mask=None, **more):
        return original(self, module, ids, mask=None, **more)

    monkeypatch.setattr(Runner, "_forward", unmasked)
    assert oracle_finds(model, decode=True)
    assert "decoded_as_prompt" in check_finds(model, decode=True)


def test_router_logits_are_rounded_through_bfloat16(model, monkeypatch):
    reads(monkeypatch, "router_logits", lambda raw, _: raw.bfloat16().float())
    assert oracle_finds(model)
    assert "router_weighs" in check_finds(model, ["expert_weights"])


def test_indices_come_from_another_layer(model, monkeypatch):
    last = {}

    def earlier(raw, block):
        before, last[raw.shape] = last.get(raw.shape, raw), raw
        return before

    reads(monkeypatch, "expert_indices", earlier)
    assert oracle_finds(model)
    assert {"router_chooses", "router_weighs"} <= check_finds(model, ["expert_indices"])


def test_another_item_of_the_tuple_is_read(model, tmp_path):
    def with_items(weights: int, indices: int):
        path = tmp_path / "schema.yaml"
        path.write_text(
            "families: {kimi_linear: {sites: {mixture: {\n"
            f"  expert_weights: {{output: gate, item: {weights}, axes: [token, slot]}},\n"
            f"  expert_indices: {{output: gate, item: {indices}, axes: [token, slot]}}}}}}}}}}\n"
        )
        family = load_schema(path).families["kimi_linear"]
        return dataclasses.replace(architecture(model), family=family)

    assert "router_weighs" in check_finds(model, ["expert_weights"], found=with_items(2, 2))
    with pytest.raises(UsageError, match="expert_weights"):
        check_finds(model, ["expert_weights"], found=with_items(0, 2))


def test_the_first_sequence_is_zero(model, monkeypatch):
    """As where a mask meant for a position meets the batch axis."""
    gives(monkeypatch, lambda key, piece: piece.tensor * (piece.row > 0) if "layer_output" in key else piece.tensor)
    assert oracle_finds(model)
    assert {"no_row_of_zeros", "row_alone"} <= check_finds(model, ["residuals"])


def test_zeros_in_the_place_of_values(model, monkeypatch):
    gives(monkeypatch, lambda key, piece: torch.zeros_like(piece.tensor) if "states" in key else piece.tensor)
    assert oracle_finds(model)
    assert {"varied", "states_replay"} <= check_finds(model, ["states"])


def test_the_first_token_is_dropped(model, monkeypatch):
    gives(monkeypatch, lambda key, piece: piece.tensor[1:] if "layer_output" in key else piece.tensor)
    assert oracle_finds(model)
    assert "mlp_adds" in check_finds(model, ["residuals"])


def test_positions_are_one_off(model, monkeypatch):
    original = Positions.window

    def one_off(self, past, count, total):
        offset, number, slot = original(self, past, count, total)
        return (offset + 1, number - 1, slot) if number > 1 else (offset, number, slot)

    monkeypatch.setattr(Positions, "window", one_off)
    assert oracle_finds(model)
    assert "final_replay" in check_finds(model, ["state_output"])


def test_patterns_are_computed_without_the_mask(model, monkeypatch):
    original = attention._queried

    def unmasked(want, rows, queries, keys, mask):
        batch, width = len(rows.counts), rows.width_tokens
        yield from original(want, rows, queries, keys, torch.ones(batch, 1, width, width, dtype=torch.bool))

    monkeypatch.setattr(attention, "_queried", unmasked)
    assert oracle_finds(model)
    assert "patterns_causal" in check_finds(model, ["patterns"])


def test_states_are_transposed(model, monkeypatch):
    original = kda.states_at

    def transposed(*factors, **more):
        states, final = original(*factors, **more)
        return states.transpose(-1, -2), final.transpose(-1, -2)

    monkeypatch.setattr(kda, "states_at", transposed)
    assert oracle_finds(model)
    assert "states_replay" in check_finds(model, ["states"])


def test_slots_are_not_weighted(model, monkeypatch):
    original = computed.expert_outputs

    def unweighted(want, rows, *, experts):
        module, arguments = experts
        ones = torch.ones_like(arguments["top_k_weights"])
        return original(want, rows, experts=(module, {**arguments, "top_k_weights": ones}))

    monkeypatch.setitem(computed.FUNCTIONS, "expert_outputs", unweighted)
    assert oracle_finds(model)
    assert "slots_add" in check_finds(model, ["expert_outputs"])


def test_another_head_is_picked(model, monkeypatch):
    """The comparison that must fail here holds in `test_selected_layers_and_heads`."""
    monkeypatch.setattr("kimicap.hooks.pick_heads", lambda tensor, want, axis: tensor.narrow(axis, 0, 1))
    found = capture_prompts(model, ROWS[:1], ["linear_attn.attention_keys"], heads="1")
    expected = reference(model, ROWS[0])["linear_attn.attention_keys"][0][:, [1]]
    assert not torch.allclose(found["linear_attn.attention_keys", 0, 0].double(), expected, rtol=1e-3)


def test_hooks_change_what_the_model_computes(model, monkeypatch):
    reads(monkeypatch, "layer_mid", lambda raw, _: raw.mul_(1 + 1e-5))
    assert "hooks_change_nothing" in check_finds(model, ["layer_mid"])


def test_a_hybrid_models_mixer_gives_zeros():
    broken = tiny_model()
    broken.model.layers[1].self_attn.o_proj.weight.zero_()
    assert "varied" in check_finds(broken, ["attention_output"])
