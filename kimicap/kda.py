"""Kimi Delta Attention's recurrent state: at chosen positions, and rebuilt from stored factors.

The rule, for one head and in float32 (Kimi Linear, arXiv:2510.26692, section 3; transformers'
``recurrent_kimi_delta_attention``), with queries and keys of unit length, queries scaled by 1/sqrt(K)::

    S <- diag(exp(g_t)) S
    S <- S + beta_t k_t (v_t - S^T k_t)^T
    o_t = S^T q_t

Shapes are written with B rows, T tokens, H heads, K key channels, V value channels, P wanted positions.
`replay` is that rule word for word. `states_at` gives the same states faster: in chunks on the CPU
(`kimicap.kda_chunks`), with a kernel on CUDA (`kimicap.kda_triton`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kimicap import kda_chunks
from kimicap.errors import UsageError


def states_at(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    *,
    at: Sequence[int],
    initial: Tensor | None = None,
    lengths: Tensor | None = None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """Give the state after each wanted token, and after each row's last real token.

    Args:
        keys: ``[B, T, H, K]``, any float dtype, as they enter the delta rule: not yet of unit length.
        values: ``[B, T, H, V]``, any float dtype.
        decays: ``[B, T, H, K]``, log decays, at most 0.
        betas: ``[B, T, H]``, write strengths in [0, 1].
        at: the wanted positions, from 0, in any order; repeats are allowed.
        initial: ``[B, H, K, V]``, the state before the first token; zeros when None.
        lengths: ``[B]`` integers, the real tokens of each row (its first ones); None means all T. Whatever
            lies beyond them, NaN included, reaches no state.
        chunk: tokens worked on together on the CPU; a matter of speed only.

    Returns:
        States ``[B, P, H, K, V]`` float32, NaN where ``at`` lies beyond the row's real tokens, and the final
        states ``[B, H, K, V]`` float32 (the initial one in a row without real tokens).

    Raises:
        UsageError: shapes do not fit together, a position is negative, or ``chunk`` is below 1.
    """
    _check(keys, values, decays, betas, initial, lengths)
    if any(position < 0 for position in at):
        raise UsageError(f"State position {min(at)} was asked for; positions count from 0: ask for 0 or more.")
    if chunk < 1:
        raise UsageError(f"chunk is {chunk}; it is a number of tokens, so give 1 or more.")
    tokens = keys.shape[1]
    inside = sorted({position for position in at if position < tokens})
    with torch.no_grad():
        states, final = _distinct_states(keys, values, decays, betas, inside, initial, lengths, chunk)
        if list(at) == inside:
            return states, final
        return _arranged(states, inside, at, tokens), final


def replay(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    *,
    initial: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
    queries: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule token by token from a known state: the plain reference, and the way back from factors.

    To rebuild the states after tokens p+1 .. q-1 from a stored state after token p, pass that state as
    ``initial``, ``start=p + 1`` and ``stop=q``.

    Args:
        keys: ``[B, T, H, K]``, as captured (not yet of unit length).
        values: ``[B, T, H, V]``.
        decays: ``[B, T, H, K]``, log decays, at most 0.
        betas: ``[B, T, H]``.
        initial: ``[B, H, K, V]``, the state before token ``start``; zeros when None.
        start: the first token to run.
        stop: one past the last token to run; T when None.
        queries: ``[B, T, H, K]``, as captured (neither of unit length nor scaled), to get outputs too.

    Returns:
        States ``[B, stop - start, H, K, V]`` float32, one after each token run, and the head outputs
        ``[B, stop - start, H, V]`` float32, or None without queries.

    Raises:
        UsageError: shapes do not fit together, or start and stop do not lie within the tokens.
    """
    _check(keys, values, decays, betas, initial, None)
    tokens = keys.shape[1]
    stop = tokens if stop is None else stop
    if not 0 <= start <= stop <= tokens:
        raise UsageError(
            f"Tokens {start} to {stop} were asked for, but there are {tokens}; "
            f"choose start and stop with 0 <= start <= stop <= {tokens}."
        )
    if queries is not None and queries.shape != keys.shape:
        raise UsageError(f"queries have shape {list(queries.shape)}, expected the keys' {list(keys.shape)}.")
    with torch.no_grad():
        state = _first_state(keys, values, initial)
        states = state.new_empty(state.shape[0], stop - start, *state.shape[1:])
        outputs = None if queries is None else torch.empty_like(states[:, :, :, 0])
        for index, token in enumerate(range(start, stop)):
            state = _step(state, keys[:, token], values[:, token], decays[:, token], betas[:, token])
            states[:, index] = state
            if queries is not None and outputs is not None:
                query = kda_chunks.unit(queries[:, token].float()) * queries.shape[-1] ** -0.5
                outputs[:, index] = (state * query[..., None]).sum(-2)
        return states, outputs


def log_decay(raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Turn the forget gate's raw output into log decays, as the kernels do inside.

    With a bound (Kimi-K3): ``lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))``.
    Without (Kimi-Linear): ``-exp(A_log) * softplus(raw + dt_bias)``.

    Args:
        raw: ``[B, T, H, K]``, any float dtype.
        A_log: any shape, at least H elements, of which the first H count (K3's checkpoint holds 128 for its
            96 heads).
        dt_bias: any shape, H * K elements.
        lower_bound: the lowest log decay there can be, or None.

    Returns:
        ``[B, T, H, K]`` float32, at most 0.

    Raises:
        UsageError: A_log or dt_bias hold too few elements, or dt_bias too many.
    """
    heads, channels = raw.shape[-2:]
    if A_log.numel() < heads:
        raise UsageError(f"A_log holds {A_log.numel()} elements, expected one for each of the {heads} heads.")
    if dt_bias.numel() != heads * channels:
        raise UsageError(
            f"dt_bias holds {dt_bias.numel()} elements, expected {heads} heads x {channels} channels "
            f"= {heads * channels}."
        )
    with torch.no_grad():
        rate = A_log.reshape(-1)[:heads].float().exp()[:, None]
        gate = raw.float() + dt_bias.float().reshape(heads, channels)
        if lower_bound is not None:
            return lower_bound * torch.sigmoid(rate * gate)
        return -rate * torch.nn.functional.softplus(gate)


def _distinct_states(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    at: list[int],
    initial: Tensor | None,
    lengths: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Give the states at ascending positions, all below T, by the way that fits the device."""
    if keys.is_cuda:
        from kimicap import kda_triton  # needs triton, which only CUDA builds of torch bring

        return kda_triton.states_on_cuda(keys, values, decays, betas, at, initial, lengths)
    first = _first_state(keys, values, initial)
    states, final = kda_chunks.states_by_chunks(keys, values, decays, betas, at, first, lengths, chunk)
    if not final.isfinite().all():
        # A NaN or infinity among real tokens never leaves a state again, but in the chunked form it also
        # spoils tokens before it; the plain rule keeps those right.
        return _states_by_tokens(keys, values, decays, betas, at, first, lengths)
    return states, final


def _states_by_tokens(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    at: list[int],
    state: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do what `states_by_chunks` does, token by token, whatever the numbers."""
    slots = {position: slot for slot, position in enumerate(at)}
    states = state.new_full((state.shape[0], len(at), *state.shape[1:]), torch.nan)
    for token in range(keys.shape[1]):
        moved = _step(state, keys[:, token], values[:, token], decays[:, token], betas[:, token])
        if lengths is None:
            real = torch.ones(state.shape[0], dtype=torch.bool, device=state.device)
        else:
            real = lengths.to(state.device) > token
        state = torch.where(real[:, None, None, None], moved, state)
        if token in slots:
            states[real, slots[token]] = state[real]
    return states, state


def _step(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Write one token, ``[B, H, ...]``, into the state ``[B, H, K, V]``."""
    key = kda_chunks.unit(key.float())[..., None]
    state = state * decay.float().exp()[..., None]
    recalled = (state * key).sum(-2)
    written = beta.float()[..., None] * (value.float() - recalled)
    return state + key * written[..., None, :]


def _first_state(keys: Tensor, values: Tensor, initial: Tensor | None) -> Tensor:
    """Give the state before the first token, ``[B, H, K, V]`` float32."""
    if initial is not None:
        return initial.to(keys.device, torch.float32)
    rows, _, heads, channels = keys.shape
    return torch.zeros(rows, heads, channels, values.shape[-1], device=keys.device)


def _arranged(states: Tensor, inside: list[int], at: Sequence[int], tokens: int) -> Tensor:
    """Bring states at ascending positions into the order asked for, NaN where there is no such token."""
    slots = {position: slot for slot, position in enumerate(inside)}
    wanted = [slot for slot, position in enumerate(at) if position < tokens]
    source = [slots[at[slot]] for slot in wanted]
    arranged = states.new_full((states.shape[0], len(at), *states.shape[2:]), torch.nan)
    arranged[:, wanted] = states[:, source]
    return arranged


def _check(
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
) -> None:
    """Refuse shapes that do not fit together, all of them in one report."""
    if keys.dim() != 4 or values.dim() != 4:
        raise UsageError(
            f"keys have shape {list(keys.shape)} and values {list(values.shape)}; "
            "expected [row, position, head, channel] for both."
        )
    rows, tokens, heads, channels = keys.shape
    width = values.shape[-1]
    expected: list[tuple[str, Tensor | None, list[int]]] = [
        ("values", values, [rows, tokens, heads, width]),
        ("decays", decays, [rows, tokens, heads, channels]),
        ("betas", betas, [rows, tokens, heads]),
        ("initial", initial, [rows, heads, channels, width]),
        ("lengths", lengths, [rows]),
    ]
    wrong = [
        f"{name} have shape {list(tensor.shape)}, expected {shape}"
        for name, tensor, shape in expected
        if tensor is not None and list(tensor.shape) != shape
    ]
    if wrong:
        raise UsageError(f"With keys of shape {list(keys.shape)}: {'; '.join(wrong)}.")
