"""How a found value is judged against an expected one."""

from typing import Any

import torch


def assert_close(
    found: Any,
    expected: Any,
    *,
    rel: float = 1e-5,
    rel_max: float | None = None,
    name: str = "value",
    layer: int | None = None,
) -> None:
    """Fail unless ``found`` equals ``expected`` up to rounding, in shape and in every element.

    Two measures, since each is blind where the other sees: the Frobenius norm of the difference over
    that of ``expected`` (a small error everywhere), and the largest difference over the largest
    expected magnitude (one wrong element among many). Infinities and NaN must lie at the same
    places; integers and booleans must be equal.

    Args:
        found: Array or tensor of any dtype.
        expected: Array or tensor of the same shape.
        rel: Largest Frobenius-relative error.
        rel_max: Largest max-relative error; 10 times ``rel`` if not given.
        name: The value's name, for the message.
        layer: The value's block, for the message.
    """
    where = name if layer is None else f"{name} of block {layer}"
    found, expected = _tensor(found), _tensor(expected)
    if found.shape != expected.shape:
        raise AssertionError(f"{where}: shape {list(found.shape)}, expected {list(expected.shape)}.")
    if not expected.is_floating_point():
        _assert_equal(found, expected, where)
        return
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    _assert_equal(found[~finite].nan_to_num(nan=7.0), expected[~finite].nan_to_num(nan=7.0), where)
    if not found[finite].isfinite().all():
        count = int((~found[finite].isfinite()).sum())
        raise AssertionError(f"{where}: {count} of {found.numel()} elements are NaN or infinite, expected finite.")
    frobenius, largest = relative_errors(found[finite], expected[finite])
    rel_max = 10 * rel if rel_max is None else rel_max
    if frobenius > rel or largest > rel_max:
        worst = torch.where(finite, (found - expected).abs(), 0.0).argmax()
        index = [int(i) for i in torch.unravel_index(worst, found.shape)]
        raise AssertionError(
            f"{where}: Frobenius-relative error {frobenius:.2e} (at most {rel:.0e}), "
            f"max-relative error {largest:.2e} (at most {rel_max:.0e}); worst at {index}: "
            f"found {found.flatten()[worst]:.6g}, expected {expected.flatten()[worst]:.6g}."
        )


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Frobenius-relative and max-relative error; absolute where everything expected is zero."""
    found, expected = _tensor(found).double(), _tensor(expected).double()
    if expected.numel() == 0:
        return 0.0, 0.0
    difference = found - expected
    norm, peak = expected.norm().item(), expected.abs().max().item()
    return difference.norm().item() / (norm or 1.0), difference.abs().max().item() / (peak or 1.0)


def same_experts(found_indices: Any, expected_logits: Any, bias: Any, k: int, tolerance: float = 1e-5) -> bool:
    """Whether ``found_indices`` are each token's top ``k`` experts, in any order of the slots.

    An expert may stand in for another whose score (sigmoid of the logit plus the bias) is less than
    ``tolerance`` above its own: rounding decides between them. Holds for a router of one group.

    Args:
        found_indices: ``[position, slot]`` integers.
        expected_logits: ``[position, expert]``, before the sigmoid.
        bias: ``[expert]``, ``e_score_correction_bias``.
        k: Experts a token.
        tolerance: Difference of scores that counts as a tie.
    """
    indices = _tensor(found_indices).long()
    scores = _tensor(expected_logits).double().sigmoid() + _tensor(bias).double()
    if indices.shape != (scores.shape[0], k) or indices.min() < 0 or indices.max() >= scores.shape[1]:
        return False
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
    if not (chosen.sum(1) == k).all():  # an expert twice
        return False
    worst_chosen = scores.masked_fill(~chosen, torch.inf).amin(1)
    best_other = scores.masked_fill(chosen, -torch.inf).amax(1)
    return bool((worst_chosen >= best_other - tolerance).all())


def slots_like(found_indices: Any, expected_indices: Any, expected: Any) -> torch.Tensor:
    """``expected`` ``[position, slot, ...]`` with its slots in the order of ``found_indices``.

    The model does not define the order of a token's slots. Both ``[position, slot]`` index arrays must
    name the same experts.
    """
    found, known, expected = _tensor(found_indices).long(), _tensor(expected_indices), _tensor(expected)
    matches = found[:, :, None] == known[:, None, :]
    if not (matches.sum(2) == 1).all():
        raise AssertionError(f"the slots name other experts: {found.tolist()}, expected {known.tolist()}.")
    order = matches.long().argmax(2)
    return torch.stack([expected[i, order[i]] for i in range(len(order))])


def _tensor(value: Any) -> torch.Tensor:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _assert_equal(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    wrong = found != expected
    if wrong.any():
        raise AssertionError(
            f"{where}: {int(wrong.sum())} of {wrong.numel()} elements differ, first found "
            f"{found[wrong][0].item()}, expected {expected[wrong][0].item()}."
        )
