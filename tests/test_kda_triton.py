"""The CUDA kernel against the plain recurrence. Without CUDA only what is said to people is tested."""

import pytest
import torch

from kimicap import kda, kda_triton
from kimicap.errors import UsageError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel runs on CUDA, none here")


def factors(rows, tokens, heads, channels, width, *, low=-2.0, dtype=torch.float32):
    shape = (rows, tokens, heads)
    keys = torch.randn(*shape, channels, device="cuda").to(dtype)
    values = torch.randn(*shape, width, device="cuda").to(dtype)
    decays = low * torch.rand(*shape, channels, device="cuda")
    return keys, values, decays, torch.rand(*shape, device="cuda").to(dtype)


def close(found, expected):
    return torch.linalg.vector_norm(found - expected) <= 1e-5 * torch.linalg.vector_norm(expected)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [-1e-3, -5.0, -80.0])
@pytest.mark.parametrize(("channels", "width"), [(128, 128), (64, 64), (16, 16), (20, 12), (256, 48)])
def test_all_states(dtype, low, channels, width):
    torch.manual_seed(0)
    given = factors(2, 37, 3, channels, width, low=low, dtype=dtype)
    expected, _ = kda.replay(*given)
    states, final = kda.states_at(*given, at=range(37))
    assert close(states, expected)
    assert close(final, expected[:, -1])


@needs_cuda
def test_long_rows_and_any_positions():
    torch.manual_seed(0)
    given = factors(2, 512, 4, 128, 128, low=-0.2)
    expected, _ = kda.replay(*given)
    at = [500, 3, 3, 63, 511]
    states, final = kda.states_at(*given, at=at)
    assert close(states, expected[:, at])
    assert close(final, expected[:, -1])


@needs_cuda
def test_one_decoded_token_from_a_transposed_state():
    torch.manual_seed(0)
    given = factors(3, 1, 2, 128, 128, dtype=torch.bfloat16)
    initial = torch.randn(3, 2, 128, 128, device="cuda").mT
    expected, _ = kda.replay(*given, initial=initial)
    states, final = kda.states_at(*given, at=[0], initial=initial)
    assert close(states, expected)
    assert close(final, expected[:, 0])


@needs_cuda
def test_pads_and_strides():
    torch.manual_seed(0)
    keys, values, decays, betas = factors(4, 20, 2, 32, 32)
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values, decays)]
    given.append(betas.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    expected, _ = kda.replay(*given)
    initial = torch.zeros(4, 2, 32, 32, device="cuda")
    lengths = [20, 0, 7, 13]
    for row, length in enumerate(lengths):
        for tensor in given:
            tensor[row, length:] = torch.nan
    states, final = kda.states_at(*given, at=range(0, 22, 3), initial=initial, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        last = expected[row, length - 1] if length else initial[row]
        assert close(final[row], last)
        for slot, position in enumerate(range(0, 22, 3)):
            if position < length:
                assert close(states[row, slot], expected[row, position])
            else:
                assert states[row, slot].isnan().all()


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr(kda_triton, "_kernel", None)
    one = torch.ones(1, 1, 1, 4)
    with pytest.raises(UsageError, match=r"^States of tensors on CUDA need the package triton, which is missing"):
        kda_triton.states_on_cuda(one, one, one, one[..., 0], [0], None, None)


def test_keys_too_wide_are_refused(monkeypatch):
    monkeypatch.setattr(kda_triton, "_kernel", object())
    one = torch.ones(1, 1, 1, 300)
    with pytest.raises(UsageError, match=r"^Keys have 300 channels; the CUDA kernel holds at most 256\.$"):
        kda_triton.states_on_cuda(one, one, one, one[..., 0], [0], None, None)
