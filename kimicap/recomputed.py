"""What a model computes and does not hand out, computed again from what went into it.

Functions for schema.yaml's ``compute``, as those of `computed`; each returns one tensor in its site's axes. Weights
that accelerate keeps on the CPU or on disk are brought back for the while.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kimicap import kda
from kimicap.architecture import Want
from kimicap.rows import Rows


def sigmoid(want: Want | None, rows: Rows, *, logits: torch.Tensor) -> torch.Tensor:
    """Sigmoid of ``logits``, in their shape and dtype."""
    return logits.sigmoid()


def turned(want: Want | None, rows: Rows, *, states: torch.Tensor | None) -> torch.Tensor | None:
    """States ``[…, key_dim, value_dim]`` of a kernel that has the values first, as a view; None stays None."""
    return None if states is None else states.transpose(-1, -2)


def log_decays(
    want: Want | None,
    rows: Rows,
    *,
    raw: torch.Tensor,
    rates: torch.Tensor,
    bias: torch.Tensor,
    bound: float | None,
) -> torch.Tensor:
    """Log decays, float32, where the gate runs inside the kernel: see `kda.log_decay`.

    Args:
        raw: ``[batch, position, head, key_dim]``, the kernel's ``g``.
        rates: Its ``A_log``, an element a head and perhaps more.
        bias: Its ``dt_bias``, an element a head and channel.
        bound: Its ``lower_bound``.
    """
    return kda.log_decay(raw, rates, bias, bound)


def situ(want: Want | None, rows: Rows, *, gate: torch.Tensor, beta: float) -> torch.Tensor:
    """SiTU's activation of a gate, ``beta tanh(gate / beta) sigmoid(gate)``, in float32, as the gate's dtype."""
    wide = gate.float()
    return (beta * torch.tanh(wide / beta) * wide.sigmoid()).to(gate.dtype)


def router_logits(want: Want | None, rows: Rows, *, gate: tuple[torch.nn.Module, Mapping[str, Any]]) -> torch.Tensor:
    """The logits ``[token, expert]`` in float32 of a router that keeps them to itself: its input times its weight."""
    module, arguments = gate
    hidden = next(iter(arguments.values()))
    with _weights_of(module):
        weight = module.get_parameter("weight")
        return torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]).float(), weight.float())


def slot_outputs(
    want: Want | None, rows: Rows, *, routed: tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Weighted output of each slot, ``[token, slot, width]``, by calling the mixture with one slot a row.

    Args:
        routed: The function that runs the experts, and what it was called with: input ``[token, width]``, then the
            experts' numbers and their weights ``[token, slot]``.
    """
    function, (hidden, index, weights) = routed
    slots = index.shape[1]
    found = function(hidden.repeat_interleave(slots, 0), index.reshape(-1, 1), weights.reshape(-1, 1))
    return found.view(hidden.shape[0], slots, -1)


def mix_sources(want: Want | None, rows: Rows, *, running: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Stored sums ``[token, n, hidden]`` and then the running sum ``[token, hidden]``: ``[token, n + 1, hidden]``."""
    return torch.cat([stored, running.reshape(-1, 1, stored.shape[-1])], 1)


def mix_weights(
    want: Want | None,
    rows: Rows,
    *,
    running: torch.Tensor,
    stored: torch.Tensor,
    proj: torch.nn.Module,
    norm: torch.nn.Module,
    sources: int,
) -> torch.Tensor:
    """Weights of an attention residual, float32 ``[token, sources]``.

    Each source, RMS-normed, is dotted with ``norm.weight * proj.weight``; a softmax over all of them.

    Args:
        running: The running sum, ``[…, hidden]``; the last source.
        stored: Sums stored so far, ``[token, n, hidden]``; the first n sources. Those between are NaN.
        proj: Module with the weight ``[1, hidden]``.
        norm: Module with a weight ``[hidden]`` and its epsilon.
        sources: Length of the axis.
    """
    with _weights_of(proj), _weights_of(norm):
        query = norm.get_parameter("weight").float() * proj.get_parameter("weight").float().view(-1)
    epsilon = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
    flat = running.reshape(-1, running.shape[-1])
    scores = []
    for source in (*stored.unbind(1), flat):  # one at a time: all of them in float32 would be the largest temporary
        wide = source.float()
        scores.append((wide @ query) * torch.rsqrt(wide.square().mean(-1) + epsilon))
    weights = torch.stack(scores, 1).softmax(1)
    spread = weights.new_full((len(flat), sources), torch.nan)
    spread[:, : stored.shape[1]], spread[:, -1] = weights[:, :-1], weights[:, -1]
    return spread


FUNCTIONS: Mapping[str, Callable[..., torch.Tensor | None]] = {
    function.__name__: function
    for function in (sigmoid, turned, log_decays, situ, router_logits, slot_outputs, mix_sources, mix_weights)
}


@contextmanager
def _weights_of(module: torch.nn.Module) -> Iterator[None]:
    """The module's own weights on its device, wherever accelerate keeps them between forwards."""
    if not any(weight.is_meta for weight in module.parameters(recurse=False)):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield
