"""The delta rule's states at chosen positions on CUDA: one Triton kernel, token by token, exact in float32.

One program carries the state of one head of one row, ``BLOCK_V`` of its value channels wide, in registers
through all tokens and stores it where a token is wanted. Tokens must be taken in turn, so the parallel work
is rows x heads x value blocks; the next token's inputs are fetched while the present one is worked on.

The module imports without triton; only `states_on_cuda` needs it. CUDA builds of torch bring it along.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimicap.errors import UsageError

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a CPU build of torch: nothing here is called
    triton = None
    constexpr = Any

MOST_CHANNELS = 256
"""Key channels a program can hold: the tile's key axis is whole, for k is normed over it."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How the kernel is cut into programs.

    Attributes:
        block_v: value channels a program, a power of two.
        num_warps: warps a program.
        num_stages: Triton's software pipelining; 1 leaves the kernel's own look-ahead of one token alone.
        max_registers: registers a thread may use; None leaves it to the compiler. Fewer let more programs
            run side by side.
    """

    block_v: int = 32
    num_warps: int = 1
    num_stages: int = 1
    max_registers: int | None = None


def _body(  # type: ignore[no-untyped-def]
    keys,
    values,
    decays,
    betas,
    initial,
    lengths,
    slot_of_token,
    states,
    final,
    tokens,
    channels,
    width,
    has_initial,
    keys_b,
    keys_t,
    keys_h,
    keys_k,
    values_b,
    values_t,
    values_h,
    values_v,
    decays_b,
    decays_t,
    decays_h,
    decays_k,
    betas_b,
    betas_t,
    betas_h,
    initial_b,
    initial_h,
    initial_k,
    initial_v,
    states_b,
    states_p,
    states_h,
    final_b,
    final_h,
    HAS_LENGTHS: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
):
    """Carry one tile [BLOCK_K, BLOCK_V] of one head's state. ``x_b`` is x's stride along b, in elements."""
    # 64-bit from here on: eight rows of states alone pass 2**31 elements.
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_in = k < channels
    v_in = v < width
    tile_in = k_in[:, None] & v_in[None, :]
    # Where the tile lies in a state of contiguous [key, value].
    tile = k[:, None] * width + v[None, :]

    if HAS_LENGTHS:
        real = tl.minimum(tl.load(lengths + row).to(tl.int32), tokens)
    else:
        real = tokens
    # Read even where there is no initial state, with the mask off: Triton lays the tile out as it is read,
    # and left to itself it picks a layout that takes half as many registers again (240, not 167, on sm_90).
    first = initial + row * initial_b + head * initial_h
    first += k[:, None] * initial_k + v[None, :] * initial_v
    state = tl.load(first, mask=tile_in & (has_initial != 0), other=0.0).to(tl.float32)

    # These step on by one token a turn, which keeps long rows clear of 32-bit products.
    key_at = keys + row * keys_b + head * keys_h + k * keys_k
    decay_at = decays + row * decays_b + head * decays_h + k * decays_k
    value_at = values + row * values_b + head * values_h + v * values_v
    beta_at = betas + row * betas_b + head * betas_h
    states += row * states_b + head * states_h

    # Pads are never read: with no token left, the masks are off and the addresses untouched.
    any_real = real > 0
    key = tl.load(key_at, mask=k_in & any_real, other=0.0).to(tl.float32)
    decay = tl.load(decay_at, mask=k_in & any_real, other=0.0).to(tl.float32)
    value = tl.load(value_at, mask=v_in & any_real, other=0.0).to(tl.float32)
    beta = tl.load(beta_at, mask=any_real, other=0.0).to(tl.float32)
    for token in tl.range(0, real):
        more = token + 1 < real
        key_at += keys_t
        decay_at += decays_t
        value_at += values_t
        beta_at += betas_t
        next_key = tl.load(key_at, mask=k_in & more, other=0.0)
        next_decay = tl.load(decay_at, mask=k_in & more, other=0.0)
        next_value = tl.load(value_at, mask=v_in & more, other=0.0)
        next_beta = tl.load(beta_at, mask=more, other=0.0)
        slot = tl.load(slot_of_token + token)

        key = key / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
        state = state * tl.exp(decay)[:, None]
        recalled = tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * (beta * (value - recalled))[None, :]
        if slot >= 0:
            tl.store(states + slot.to(tl.int64) * states_p + tile, state, mask=tile_in)

        key = next_key.to(tl.float32)
        decay = next_decay.to(tl.float32)
        value = next_value.to(tl.float32)
        beta = next_beta.to(tl.float32)

    tl.store(final + row * final_b + head * final_h + tile, state, mask=tile_in)
    # A wanted token beyond the row's end has no state.
    for token in tl.range(real, tokens):
        slot = tl.load(slot_of_token + token)
        if slot >= 0:
            missing = tl.full([BLOCK_K, BLOCK_V], float("nan"), dtype=tl.float32)
            tl.store(states + slot.to(tl.int64) * states_p + tile, missing, mask=tile_in)


_kernel: Any = None if triton is None else triton.jit(_body)


def states_on_cuda(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    at: list[int],
    initial: Tensor | None,
    lengths: Tensor | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Give the states at ascending positions below T; the arguments of `kimicap.kda.states_at` otherwise.

    Inputs are read as they are stored, in any float dtype and with any strides; nothing is copied and the
    host waits for nothing.

    Returns:
        ``[B, P, H, K, V]`` (NaN beyond a row's real tokens) and ``[B, H, K, V]``, float32.

    Raises:
        UsageError: triton is missing, or a key has more than `MOST_CHANNELS` channels.
    """
    if _kernel is None:
        raise UsageError("States of tensors on CUDA need the package triton, which is missing; install it.")
    rows, tokens, heads, channels = keys.shape
    width = values.shape[-1]
    if channels > MOST_CHANNELS:
        raise UsageError(f"Keys have {channels} channels; the CUDA kernel holds at most {MOST_CHANNELS}.")
    tile = tile or Tile()
    device = keys.device
    states = torch.empty(rows, len(at), heads, channels, width, dtype=torch.float32, device=device)
    final = torch.empty(rows, heads, channels, width, dtype=torch.float32, device=device)
    if final.numel() == 0:
        return states, final
    slots = _slots(at, tokens, device)
    first = final if initial is None else initial.to(device)
    counts = slots if lengths is None else lengths.to(device, torch.int32, non_blocking=True).contiguous()
    grid = (-(-width // tile.block_v), heads, rows)
    with torch.cuda.device(device):
        _kernel[grid](
            *(keys, values, decays, betas, first, counts, slots, states, final),
            *(tokens, channels, width, int(initial is not None)),
            *(*keys.stride(), *values.stride(), *decays.stride(), *betas.stride(), *first.stride()),
            *states.stride()[:3],
            *final.stride()[:2],
            HAS_LENGTHS=lengths is not None,
            BLOCK_K=max(16, 1 << (channels - 1).bit_length()),
            BLOCK_V=tile.block_v,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )
    return states, final


def _slots(at: list[int], tokens: int, device: torch.device) -> Tensor:
    """Give, for each of T tokens, the index of its state among the wanted ones, or -1: ``[T]`` int32."""
    slots = torch.full((max(1, tokens),), -1, dtype=torch.int32)
    slots[at] = torch.arange(len(at), dtype=torch.int32)
    if device.type == "cuda":
        # From pinned memory, so that the host does not wait for the forward that is still running.
        return slots.pin_memory().to(device, non_blocking=True)
    return slots
