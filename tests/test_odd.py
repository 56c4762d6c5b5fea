"""Counts of what is not finite, against numpy's over the elements that pieces gave."""

import numpy as np
import pytest
import torch

from kimicap.odd import Odd


def counts(layout, pieces, *, layers=2, sequences=3, extent=4, fill=torch.nan, dtype=torch.float32):
    """Lays pieces ``(layer, sequences, begins, tensor)`` into a shard full of fill, and counts."""
    odd = Odd(layout, layers=layers, sequences=sequences)
    data = torch.full((layers, sequences, *[extent] * len(layout)), fill, dtype=dtype)
    for layer, rows, begins, tensor in pieces:
        place = [slice(first, first + size) for first, size in zip(begins, tensor.shape[1:], strict=True)]
        part = data[layer, rows][:, *place]
        part.copy_(tensor)
        odd.see(layer, rows, begins, tensor, part)
    odd.gather()
    return {(layer, kind): number for layer, kind, number in odd.count(data)}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layers_own_elements_are_counted_and_fill_is_not(bad, dtype):
    first, second = torch.ones(2, 3, 4, dtype=dtype), torch.ones(1, 2, 4, dtype=dtype)
    first[1, 2, 1] = bad
    first[0, 0] = bad
    found = counts(("position", "hidden"), [(1, slice(0, 2), (0, 0), first), (0, slice(2, 3), (0, 0), second)])
    assert found == {(1, "nonfinite"): 5}


def test_opposite_infinities_do_not_cancel():
    piece = torch.tensor([[torch.inf, -torch.inf, 0.0]])
    assert counts(("hidden",), [(0, slice(0, 1), (0,), piece)]) == {(0, "nonfinite"): 2}


def test_large_numbers_whose_sum_overflows_are_not_counted():
    piece = torch.full((3, 4), 3e38)
    assert counts(("hidden",), [(0, slice(0, 3), (0,), piece)]) == {}


def test_heads_and_positions_that_come_in_several_pieces():
    pieces = []
    for head in range(4):
        piece = torch.zeros(1, 3, 1)
        piece[0, head % 3] = torch.nan if head else 0.0
        pieces.append((1, slice(1, 2), (0, head), piece))
    assert counts(("position", "head"), pieces) == {(1, "nonfinite"): 3}


def test_minus_infinity_is_a_masked_keys_own():
    scores = torch.zeros(1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    place = (slice(0, 1), (0, 0))
    assert counts(("query", "key"), [(0, *place, scores)]) == {}
    scores[0, 2, 0], scores[0, 1, 1] = torch.inf, torch.nan
    assert counts(("query", "key"), [(0, *place, scores)]) == {(0, "nonfinite"): 2}


def test_nan_is_what_a_source_not_yet_stored_weighs():
    weights = torch.tensor([[[0.5, torch.nan, 0.5], [1.0, torch.nan, 0.0]]])
    place = (0, slice(0, 1), (0, 0))
    assert counts(("position", "source"), [(*place, weights)]) == {}
    weights[0, 0, 0] = torch.inf
    assert counts(("position", "source"), [(*place, weights)]) == {(0, "nonfinite"): 1}
    weights[0, 1] = torch.nan  # a token whose weights are all broken
    assert counts(("position", "source"), [(*place, weights)]) == {(0, "nonfinite"): 3}
    assert counts(("position", "source"), [(*place, weights[:, 1:])]) == {(0, "nonfinite"): 1}


def test_sums_have_no_sources_to_come():
    sums = torch.zeros(1, 3, 2, 4)
    sums[0, :, 1] = torch.nan
    assert counts(("position", "source", "hidden"), [(0, slice(0, 1), (0, 0, 0), sums)]) == {(0, "nonfinite"): 12}


def test_values_beyond_float16():
    piece = torch.tensor([[1.0, 7e4, -7e4, 65504.0]])
    place = (1, slice(0, 1), (0,))
    assert counts(("hidden",), [(*place, piece)], dtype=torch.float16) == {(1, "overflow"): 2}
    piece[0, 0] = torch.inf
    found = counts(("hidden",), [(*place, piece)], dtype=torch.float16)
    assert found[1, "overflow"] == 2


def test_indices_are_never_odd():
    piece = torch.full((1, 4), -1)
    assert counts(("slot",), [(0, slice(0, 1), (0,), piece)], dtype=torch.int16, fill=-1) == {}


@pytest.mark.parametrize("seed", range(20))
def test_random_rows(seed):
    draw = np.random.default_rng(seed)
    pieces, expected = [], {}
    for layer in range(2):
        for row in range(3):
            piece = torch.from_numpy(draw.normal(size=(1, int(draw.integers(1, 5)), 4)).astype(np.float32))
            piece[torch.rand(piece.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = torch.nan
            pieces.append((layer, slice(row, row + 1), (0, 0), piece))
            expected[layer] = expected.get(layer, 0) + int((~np.isfinite(piece.numpy())).sum())
    found = counts(("position", "hidden"), pieces)
    assert found == {(layer, "nonfinite"): number for layer, number in expected.items() if number}
