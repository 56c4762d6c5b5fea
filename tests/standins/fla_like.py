"""What the checkpoints' modelling code imports from flash-linear-attention, in plain PyTorch.

Same names, same keyword arguments, same shapes; a loop over tokens in float32 in the place of the kernels.
Shape suffixes: B batch, T tokens, H heads, K key width, V value width, N sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    return_intermediate_states: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The delta rule over a prompt: read-outs ``[B, T, H, V]`` and, if asked for, final states in float32.

    Args:
        q, k, v: ``[B, T, H, width]``; with ``cu_seqlens`` B is 1 and its sequences lie one after the other.
        g: Log decays ``[B, T, H, K]``, or what the gate makes them from with ``use_gate_in_kernel``.
        beta: Write strengths ``[B, T, H]``, or their logits with ``use_beta_sigmoid_in_kernel``.
        transpose_state_layout: States are ``[N, H, V, K]``, not ``[N, H, K, V]``.
        return_intermediate_states: As a third result, in bfloat16, the state before each 64 tokens of a sequence:
            ``[B, chunks, H, K, V]``, or ``[1, chunks of all sequences, H, K, V]`` with ``cu_seqlens``.
    """
    assert safe_gate is False or lower_bound is not None
    assert not return_intermediate_states or torch.is_inference_mode_enabled()
    out, final, entering = _kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, lower_bound, transpose_state_layout, cu_seqlens, A_log, dt_bias,
    )  # fmt: skip
    return (out, final, entering) if return_intermediate_states else (out, final)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    lower_bound: float | None = None,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_kda`, token by token on any machine; it knows no ``safe_gate``."""
    return _kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, lower_bound, transpose_state_layout, cu_seqlens, A_log, dt_bias,
    )[:2]  # fmt: skip


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor,
    head_dim: int,
    g_bias: Tensor | None = None,
) -> Tensor:
    """Log decays ``[..., H, head_dim]`` in float32 from ``g`` ``[..., H * head_dim]``."""
    g = g.float() if g_bias is None else g.float() + g_bias.float()
    g = g.unflatten(-1, (-1, head_dim))
    return -A_log.float().flatten()[: g.shape[-2], None].exp() * functional.softplus(g)


def _kda(
    q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, gate, beta_sigmoid, lower_bound, v_first,
    cu_seqlens, A_log, dt_bias,
):  # fmt: skip
    dtype = v.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    heads, key_dim = q.shape[2:]
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if gate:
        rate = A_log.float().flatten()[:heads, None].exp()
        g = g.view(*q.shape) + (0.0 if dt_bias is None else dt_bias.float().view(heads, key_dim))
        g = -rate * functional.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    if beta_sigmoid:
        beta = beta.sigmoid()
    q = q * (key_dim**-0.5 if scale is None else scale)
    if cu_seqlens is None:
        bounds = [(row, 0, q.shape[1]) for row in range(len(q))]
    else:
        assert len(q) == 1
        bounds = [(0, int(a), int(b)) for a, b in pairwise(cu_seqlens)]
    out, finals, entering = torch.zeros_like(v), [], []
    for number, (row, first, end) in enumerate(bounds):
        state = q.new_zeros(heads, key_dim, v.shape[-1])
        if initial_state is not None:
            state = initial_state[number].float()
            state = state.transpose(-1, -2) if v_first else state
        for t in range(first, end):
            if (t - first) % 64 == 0:
                entering.append(state.transpose(-1, -2) if v_first else state)
            state = state * g[row, t].exp()[..., None]
            error = v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t])
            state = state + torch.einsum("hk,hv->hkv", beta[row, t][:, None] * k[row, t], error)
            out[row, t] = torch.einsum("hkv,hk->hv", state, q[row, t])
        finals.append(state.transpose(-1, -2) if v_first else state)
    chunks = torch.stack(entering).bfloat16().unflatten(0, (len(q), -1))
    return out.to(dtype), torch.stack(finals).contiguous() if output_final_state else None, chunks


class ShortConvolution(nn.Module):
    """Causal convolution of each channel over the latest ``kernel_size`` tokens, then SiLU."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str = "silu"):
        super().__init__()
        assert activation == "silu"
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.randn(hidden_size, 1, kernel_size) / kernel_size**0.5)

    def forward(
        self,
        x: Tensor,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, as ``x`` ``[B, T, D]``, and the latest inputs ``[N, D, kernel_size]``."""
        if cu_seqlens is None:
            pieces = list(x.split(1))
        else:
            pieces = [x[:, a:b] for a, b in pairwise(cu_seqlens.tolist())]
        outputs, states = [], []
        for number, piece in enumerate(pieces):
            before = x.new_zeros(1, x.shape[2], self.kernel_size) if cache is None else cache[number : number + 1]
            longer = torch.cat([before, piece.transpose(1, 2)], dim=2)
            states.append(longer[:, :, -self.kernel_size :])
            y = functional.conv1d(longer[:, :, 1:], self.weight, groups=x.shape[2])
            outputs.append(functional.silu(y).transpose(1, 2))
        output = torch.cat(outputs, dim=0 if cu_seqlens is None else 1)
        return output, torch.cat(states) if output_final_state else None


class FusedRMSNormGated(nn.Module):
    """RMS norm over a head's channels, times the sigmoid of a gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "sigmoid"):
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (normed * g.float().sigmoid()).to(x.dtype)


def unpad(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, T, D]`` as ``[1, real tokens, D]``, their indices in ``B·T``, and where each sequence begins and ends."""
    indices = mask.flatten().nonzero()[:, 0]
    lengths = mask.sum(1, dtype=torch.int32)
    return hidden.flatten(0, 1)[indices][None], indices, functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def pad(tensor: Tensor, indices: Tensor, batch: int, tokens: int) -> Tensor:
    """``[1, real tokens, D]`` back to ``[B, T, D]``, zeros between."""
    return tensor.new_zeros(batch * tokens, tensor.shape[2]).index_copy(0, indices, tensor[0]).view(batch, tokens, -1)
