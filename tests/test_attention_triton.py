"""The CUDA kernel of causal probabilities against a softmax in float64, and where it is not used."""

import pytest
import torch

from kimicap import attention_triton
from kimicap.attention_triton import fits, probabilities_on_cuda

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel runs on CUDA, none here")


def expected(queries, keys, first, step, scaling):
    scores = scaling * queries.double() @ keys.double().mT
    position = first + step * torch.arange(queries.shape[1], device=queries.device)
    after = torch.arange(keys.shape[1], device=queries.device) > position[:, None]
    return scores.masked_fill(after, -torch.inf).softmax(-1)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [192, 128, 24, 5])
@pytest.mark.parametrize(
    ("number", "total", "first", "step"),
    [(300, 300, 0, 1), (1, 130, 129, 1), (7, 500, 40, 64), (128, 512, 384, 1), (1, 1, 0, 1), (5, 300, 9, 1)],
)
def test_probabilities(dtype, channels, number, total, first, step):
    torch.manual_seed(0)
    queries = torch.randn(3, number, channels, device="cuda").to(dtype)
    keys = torch.randn(3, total, channels, device="cuda").to(dtype)
    assert fits(queries)
    found = probabilities_on_cuda(queries, keys, first=first, step=step, scaling=0.3)
    wanted = expected(queries, keys, first, step, 0.3)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 2e-6
    assert (found[wanted == 0] == 0).all()


@needs_cuda
def test_strides_as_the_model_has_them_and_heads_that_share_keys():
    torch.manual_seed(0)
    queries = torch.randn(200, 4, 192, device="cuda").bfloat16().transpose(0, 1)[:, ::2]
    keys = torch.randn(200, 1, 192, device="cuda").bfloat16().transpose(0, 1).expand(4, -1, -1)
    found = probabilities_on_cuda(queries, keys, first=0, step=2, scaling=0.07)
    assert (found - expected(queries, keys, 0, 2, 0.07)).abs().max() < 2e-6


@needs_cuda
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(bad):
    torch.manual_seed(0)
    queries, keys = (torch.randn(2, 150, 64, device="cuda").bfloat16() for _ in range(2))
    keys[1, 100, 3] = bad
    found = probabilities_on_cuda(queries, keys, first=0, step=1, scaling=1.0)
    assert found[0].isfinite().all()
    assert found[1, :100].isfinite().all()
    assert found[1, 100:].isnan().any(-1).sum() > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_the_cpu_are_left_to_torch(dtype):
    assert not fits(torch.zeros(1, 1, 64, dtype=dtype))


@needs_cuda
def test_what_the_kernel_cannot_hold_is_left_to_torch(monkeypatch):
    assert fits(torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda"))
    assert not fits(torch.zeros(1, 1, 64, device="cuda"))
    assert not fits(torch.zeros(1, 1, 300, dtype=torch.bfloat16, device="cuda"))
    monkeypatch.setattr(attention_triton, "_kernel", None)
    assert not fits(torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda"))
