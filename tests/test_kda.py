"""The delta rule's states against a float64 recurrence in its matrix form."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicap import kda, kda_chunks
from kimicap.errors import UsageError
from tests.models import need_kimi_linear

torch.set_num_threads(1)


def factors(rows, tokens, heads, channels, width, *, decay=(-1.0, 0.0), beta=(0.0, 1.0), seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, tokens, heads, channels, generator=rng).to(dtype)
    values = torch.randn(rows, tokens, heads, width, generator=rng).to(dtype)
    decays = decay[0] + (decay[1] - decay[0]) * torch.rand(rows, tokens, heads, channels, generator=rng)
    betas = (beta[0] + (beta[1] - beta[0]) * torch.rand(rows, tokens, heads, generator=rng)).to(dtype)
    return keys, values, decays, betas


def oracle(keys, values, decays, betas, initial=None):
    """S_t = (1 - beta k k^T) diag(e^g) S_{t-1} + beta k v^T, one head at a time; [B, T, H, K, V] float64."""
    keys, values, decays, betas = (np.asarray(x.double()) for x in (keys, values, decays, betas))
    rows, tokens, heads, channels = keys.shape
    states = np.zeros((rows, tokens, heads, channels, values.shape[-1]))
    for row, head in np.ndindex(rows, heads):
        state = np.zeros(states.shape[-2:]) if initial is None else np.asarray(initial[row, head].double())
        for token in range(tokens):
            key = keys[row, token, head]
            key = key / np.sqrt(key @ key + 1e-6)
            beta = betas[row, token, head]
            step = (np.eye(channels) - beta * np.outer(key, key)) @ np.diag(np.exp(decays[row, token, head]))
            state = step @ state + beta * np.outer(key, values[row, token, head])
            states[row, token, head] = state
    return torch.from_numpy(states)


def error(found, expected):
    """Relative Frobenius error of each state; the worst."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    if found.numel() == 0:
        return 0.0
    off = torch.linalg.matrix_norm(found.double() - expected)
    return float((off / torch.linalg.matrix_norm(expected).clamp_min(1e-30)).amax())


CASES = {
    "weak decay": {"decay": (-1e-3, 0.0)},
    "no decay": {"decay": (0.0, 0.0)},
    "strong decay": {"decay": (-12.0, -2.0)},
    "bounded decay": {"decay": (-5.0, 0.0)},
    "huge decay": {"decay": (-200.0, -80.0)},
    "betas near one": {"beta": (0.999, 1.0), "decay": (-1e-2, 0.0)},
    "betas near zero": {"beta": (0.0, 1e-3)},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 16, 45])
def test_all_states_match_the_recurrence(case, tokens):
    given_factors = factors(2, tokens, 2, 16, 12, **CASES[case])
    expected = oracle(*given_factors)
    states, final = kda.states_at(*given_factors, at=range(tokens))
    assert error(states, expected) < 1e-5
    assert error(final, expected[:, -1]) < 1e-5


def test_strong_beside_weak_decays_lose_no_digits():
    # Differences of running sums near -3000 would leave the weak decays after them two or three digits.
    keys, values, decays, betas = factors(1, 48, 2, 16, 16, decay=(-1e-3, 0.0))
    decays[:, ::5, :, ::2] = -1000.0
    decays[:, 7, :, :] = -float("inf")
    states, _ = kda.states_at(keys, values, decays, betas, at=range(48), chunk=32)
    expected = oracle(keys, values, decays, betas)
    assert float((states.double() - expected).abs().max()) < 1e-5
    assert error(states, expected) < 1e-6


@pytest.fixture(scope="module", params=[-0.01, -0.2, -6.0])
def long_row(request):
    given_factors = factors(1, 512, 3, 16, 16, decay=(request.param, 0.0))
    return given_factors, oracle(*given_factors, torch.ones(1, 3, 16, 16))


@pytest.mark.parametrize("at", [range(63, 512, 64), range(0, 512, 7), [200], range(100, 130), []])
def test_long_rows(long_row, at, monkeypatch):
    # Small slices and segments, so that rows, heads and time are all cut.
    monkeypatch.setattr(kda_chunks, "SLICE_BYTES", 200_000)
    monkeypatch.setattr(kda_chunks, "SEGMENT_TOKENS", 150)
    given_factors, expected = long_row
    states, final = kda.states_at(*given_factors, at=at, initial=torch.ones(1, 3, 16, 16))
    assert error(states, expected[:, list(at)]) < 1e-5
    assert error(final, expected[:, -1]) < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, 16, 32, 64])
def test_the_chunk_changes_nothing(long_row, chunk):
    given_factors, expected = long_row
    at = [0, 15, 16, 17, 100, 511]
    states, final = kda.states_at(*given_factors, at=at, initial=torch.ones(1, 3, 16, 16), chunk=chunk)
    assert error(states, expected[:, at]) < 1e-6
    assert error(final, expected[:, -1]) < 1e-6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    rows, heads = draw(st.integers(1, 3), "rows"), draw(st.integers(1, 3), "heads")
    tokens = draw(st.integers(1, 40), "tokens")
    channels, width = draw(st.integers(1, 9), "channels"), draw(st.integers(1, 9), "width")
    lengths = draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows), "lengths")
    at = draw(st.lists(st.integers(0, tokens + 2), max_size=8), "at")
    chunk = draw(st.integers(1, 20), "chunk")
    low = draw(st.sampled_from([-1e-2, -1.0, -100.0]), "low")
    keys, values, decays, betas = factors(rows, tokens, heads, channels, width, decay=(low, 0.0))
    initial = torch.randn(rows, heads, channels, width) if draw(st.booleans(), "initial") else None
    expected = oracle(keys, values, decays, betas, initial)
    for row, length in enumerate(lengths):
        keys[row, length:], values[row, length:] = torch.nan, torch.inf
        decays[row, length:], betas[row, length:] = torch.nan, -torch.inf
    states, final = kda.states_at(
        *(keys, values, decays, betas), at=at, initial=initial, lengths=torch.tensor(lengths), chunk=chunk
    )
    assert states.shape == (rows, len(at), heads, channels, width)
    before = torch.zeros_like(final) if initial is None else initial
    for row, length in enumerate(lengths):
        last = expected[row, length - 1] if length else before[row].double()
        assert error(final[row], last) < 1e-5
        for slot, position in enumerate(at):
            if position < length:
                assert error(states[row, slot], expected[row, position]) < 2e-5
            else:
                assert states[row, slot].isnan().all()


def test_inputs_are_left_as_they_were():
    given_factors = factors(2, 20, 2, 4, 4)
    initial = torch.randn(2, 2, 4, 4)
    copies = [x.clone() for x in (*given_factors, initial)]
    kda.states_at(*given_factors, at=[3, 3, 1], initial=initial, lengths=torch.tensor([20, 7]))
    assert all(torch.equal(x, y) for x, y in zip((*given_factors, initial), copies, strict=True))


def test_without_tokens_the_final_state_is_the_initial_one():
    initial = torch.randn(2, 1, 4, 4)
    states, final = kda.states_at(*factors(2, 0, 1, 4, 4), at=[], initial=initial)
    assert states.shape == (2, 0, 1, 4, 4)
    assert torch.equal(final, initial)


def test_a_nan_among_real_tokens_spoils_nothing_before_it():
    keys, values, decays, betas = factors(2, 20, 2, 8, 8)
    expected = oracle(keys, values, decays, betas)
    values[1, 9, 0, 3] = torch.nan
    states, final = kda.states_at(keys, values, decays, betas, at=[2, 8, 9, 19], lengths=torch.tensor([12, 20]))
    assert error(states[1, :2], expected[1, [2, 8]]) < 1e-5
    assert error(states[0, :3], expected[0, [2, 8, 9]]) < 1e-5
    assert states[0, 3].isnan().all()
    assert error(final[0], expected[0, 11]) < 1e-5
    assert states[1, 2, 0, :, 3].isnan().all()
    assert final[1, 0, :, 3].isnan().all()


def test_replay_from_a_known_state():
    given_factors = factors(2, 30, 2, 8, 6)
    queries = torch.randn(2, 30, 2, 8)
    expected = oracle(*given_factors)
    whole, none = kda.replay(*given_factors)
    assert none is None
    assert error(whole, expected) < 1e-6
    states, outputs = kda.replay(*given_factors, initial=whole[:, 11], start=12, stop=20, queries=queries)
    assert error(states, expected[:, 12:20]) < 1e-6
    scaled = queries.double() / np.sqrt(8) / (queries.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    read = torch.einsum("bthkv,bthk->bthv", expected[:, 12:20], scaled[:, 12:20])
    assert outputs.shape == (2, 8, 2, 6)
    assert torch.allclose(outputs.double(), read, atol=1e-6)


def test_it_is_the_rule_of_the_model():
    need_kimi_linear()
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    keys, values, decays, betas = factors(2, 70, 2, 16, 16)
    queries = torch.randn(2, 70, 2, 16)
    outputs, state = modeling.recurrent_kimi_delta_attention(
        *(queries, keys, values),
        g=decays,
        beta=betas,
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    _, final = kda.states_at(keys, values, decays, betas, at=[])
    _, replayed = kda.replay(keys, values, decays, betas, queries=queries)
    assert torch.allclose(final, state, atol=1e-5)
    assert torch.allclose(replayed, outputs, atol=1e-5)


def test_log_decay():
    raw, a_log, bias = torch.randn(2, 3, 4, 5).bfloat16(), torch.randn(1, 1, 6, 1), torch.randn(20)
    rate = np.exp(a_log.double().numpy().ravel()[:4])[:, None]
    gate = raw.double().numpy() + bias.double().numpy().reshape(4, 5)
    bounded = kda.log_decay(raw, a_log, bias, -5.0)
    assert bounded.dtype == torch.float32
    np.testing.assert_allclose(bounded, -5 / (1 + np.exp(-rate * gate)), rtol=2e-5)
    free = kda.log_decay(raw, a_log, bias, None)
    np.testing.assert_allclose(free, -rate * np.log1p(np.exp(gate)), rtol=2e-5)


def test_texts_of_errors():
    keys, values, decays, betas = factors(2, 5, 3, 4, 6)
    with pytest.raises(UsageError, match=r"^State position -1 was asked for; positions count from 0: ask for 0"):
        kda.states_at(keys, values, decays, betas, at=[2, -1])
    with pytest.raises(UsageError, match=r"^chunk is 0; it is a number of tokens, so give 1 or more\.$"):
        kda.states_at(keys, values, decays, betas, at=[2], chunk=0)
    with pytest.raises(UsageError) as raised:
        kda.states_at(keys, values, decays[:1], betas, at=[2], initial=torch.zeros(2, 3, 6, 4))
    assert str(raised.value) == (
        "With keys of shape [2, 5, 3, 4]: decays have shape [1, 5, 3, 4], expected [2, 5, 3, 4]; "
        "initial have shape [2, 3, 6, 4], expected [2, 3, 4, 6]."
    )
    with pytest.raises(UsageError, match=r"expected \[row, position, head, channel\] for both\.$"):
        kda.states_at(keys[0], values, decays, betas, at=[2])
    with pytest.raises(UsageError, match=r"^Tokens 4 to 9 were asked for, but there are 5; choose start and stop"):
        kda.replay(keys, values, decays, betas, start=4, stop=9)
    with pytest.raises(UsageError, match=r"^queries have shape .*, expected the keys' \[2, 5, 3, 4\]\.$"):
        kda.replay(keys, values, decays, betas, queries=values)
    with pytest.raises(UsageError, match=r"^A_log holds 2 elements, expected one for each of the 3 heads\.$"):
        kda.log_decay(keys, torch.zeros(2), torch.zeros(12), None)
    with pytest.raises(UsageError, match=r"^dt_bias holds 13 elements, expected 3 heads x 4 channels = 12\.$"):
        kda.log_decay(keys, torch.zeros(3), torch.zeros(13), None)


def test_importing_it_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kimicap.kda; assert 'kimicap.kda_triton' not in sys.modules\n"
        "import kimicap.kda_triton as it; assert it.triton is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
