"""The stand-in for Kimi-K3 with flash-linear-attention's kernels at K3's head size, on a CUDA device.

Skipped, with that reason, where there is no such device or no such kernels. Triton tunes itself at the first call of
each shape, which takes minutes.
"""

import warnings

import pytest
import torch

from kimicap import kda
from kimicap.rows import Rows
from tests.capturing import capture_decoded, capture_prompts
from tests.compare import assert_close
from tests.standins import modeling_kimi_linear as modelling
from tests.standins.build import k3_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    kernels = pytest.importorskip("fla.ops.kda", reason="needs flash-linear-attention's kernels (fla-core)")

# transpose_state_layout, as K3's code calls it, is an old name in newer kernels.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

FAMILY = "kimi_k3"
KDA_BLOCKS = (0, 1)
LINEAR = {
    "kda_layers": [1, 2],
    "full_attn_layers": [3],
    "head_dim": 128,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
    "A_log_length": 6,
}
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_experts": 4, "linear_attn_config": LINEAR}
ROWS = [[3 + (7 * i) % 300 for i in range(length)] for length in (70, 100, 9, 100)]
FACTORS = ["attention_keys", "attention_values", "decays", "betas"]
WANTED = [*(f"linear_attn.{name}" for name in FACTORS), "states@all", "state_output"]


@pytest.fixture(scope="module")
def model():
    return k3_model(dtype=torch.bfloat16, **SIZES).cuda()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Puts the kernels in the place of the stand-in's functions; the name and keys' shape of each call."""
    seen = []

    def counted(name):
        kernel = getattr(kernels, name)

        def call(*args, **kwargs):
            seen.append((name, tuple(kwargs["k"].shape)))
            return kernel(*args, **kwargs)

        return call

    for name in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(modelling, name, counted(name))
    return seen


def left_padded(runner, recorder, tokens):
    """As `Runner.prompts`, but with a mask, so that the mixers drop the padding."""
    width = max(map(len, tokens)) + 2
    ids = torch.zeros(len(tokens), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, given in enumerate(tokens):
        ids[row, width - len(given) :] = torch.from_numpy(given).long()
        mask[row, width - len(given) :] = 1
    recorder.rows = Rows.of_prompts(list(map(len, tokens)), width_tokens=width, left=True)
    with torch.inference_mode():
        runner._model(input_ids=ids.cuda(), attention_mask=mask.cuda(), use_cache=False)


def check_states(captured, rows, *, decoded=0):
    """Captured states and final states against the plain recurrence over the captured factors.

    While decoding, the model goes on from its cache, in which the kernel left its own rounding of the prompt.
    """
    for number, row in enumerate(rows):
        prompt = len(row) - decoded
        for block in KDA_BLOCKS:
            factors = [captured[f"linear_attn.{name}", block, number][None] for name in FACTORS]
            decays = factors[2]
            assert decays.dtype == torch.float32
            assert decays.shape == (1, len(row), 4, 128)
            assert -5 <= decays.min()
            assert decays.max() <= 0
            states, _ = kda.replay(*factors)
            found = captured["linear_attn.states", block, number]
            assert_close(found[:prompt].cpu(), states[0, :prompt].cpu(), rel=1e-4, name="states", layer=block)
            if decoded:
                assert_close(found[prompt:].cpu(), states[0, prompt:].cpu(), rel=1e-2, rel_max=0.2, name="decoded")
                on, _ = kda.replay(*factors, initial=found[prompt, None], start=prompt + 1)
                assert_close(found[prompt + 1 :].cpu(), on[0].cpu(), rel=1e-4, name="decoded", layer=block)
            final = captured["linear_attn.state_output", block, number]
            assert_close(final.cpu(), states[0, -1].cpu(), rel=1e-2, rel_max=0.2, name="state_output", layer=block)


def test_prompts(model, calls):
    check_states(capture_prompts(model, ROWS, WANTED, family=FAMILY), ROWS)
    assert set(calls) == {("chunk_kda", (4, 100, 4, 128))}


@pytest.mark.parametrize("number", range(3))
def test_a_prompt_alone_ends_in_the_kernels_own_state(model, number):
    check_states(capture_prompts(model, ROWS[number : number + 1], WANTED, family=FAMILY), ROWS[number : number + 1])


def test_a_left_padded_batch_whose_padding_the_mixers_drop(model, calls):
    captured = capture_prompts(model, ROWS, WANTED, family=FAMILY, run=left_padded)
    check_states(captured, ROWS)
    assert set(calls) == {("chunk_kda", (1, sum(map(len, ROWS)), 4, 128))}


def test_decoding(model, calls):
    captured, rows = capture_decoded(model, ROWS, WANTED, tokens=5, family=FAMILY)
    assert [len(row) for row in rows] == [len(row) + 5 for row in ROWS]
    check_states(captured, rows, decoded=5)
    assert {("fused_recurrent_kda", (len(ROWS), 1, 4, 128))} == {call for call in calls if call[0] != "chunk_kda"}


def test_the_kernels_own_states_at_the_ends_of_its_chunks(model):
    for how in ({}, {"run": left_padded}):
        exact, fast = (
            capture_prompts(model, ROWS, ["states@every:64"], family=FAMILY, fast=fast, **how) for fast in (False, True)
        )
        assert fast.keys() == exact.keys()
        assert {row for _, _, row in fast} == {0, 1, 3}
        for (name, block, row), expected in exact.items():
            found = fast[name, block, row]
            assert (found.dtype, found.shape) == (torch.bfloat16, (1, 4, 128, 128))
            assert_close(found.float().cpu(), expected.cpu(), rel=1e-2, rel_max=0.2, name=name, layer=block)


def test_heads_read_out_of_the_captured_states(model):
    names = ["attention_queries", "attention_head_outputs", *FACTORS]
    captured = capture_prompts(model, ROWS, [f"linear_attn.{name}" for name in names], family=FAMILY, run=left_padded)
    for number in range(len(ROWS)):
        for block in KDA_BLOCKS:
            queries, read, *factors = (captured[f"linear_attn.{name}", block, number][None] for name in names)
            _, expected = kda.replay(*factors, queries=queries)
            found = read.float().cpu()
            assert_close(found, expected.cpu(), rel=1e-2, rel_max=0.2, name="attention_head_outputs", layer=block)
