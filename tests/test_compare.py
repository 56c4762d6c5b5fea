"""The comparisons must fail where values differ, and say where."""

import math

import pytest
import torch

from tests.compare import assert_close, same_experts, slots_like


def test_one_wrong_element_among_many_is_seen_where_the_norm_is_blind():
    expected = torch.ones(1000, 1000)
    found = expected.clone()
    found[5, 7] += 0.5
    with pytest.raises(AssertionError, match=r"decays of block 3: .* worst at \[5, 7\]: found 1.5, expected 1"):
        assert_close(found, expected, rel=1e-2, name="decays", layer=3)


def test_a_small_error_everywhere_is_seen():
    expected = torch.ones(10)
    with pytest.raises(AssertionError, match=r"Frobenius-relative error 2\.00e-03"):
        assert_close(expected * 1.002, expected, rel=1e-3)
    assert_close(expected * 1.0005, expected, rel=1e-3)


def test_infinities_and_nan_must_lie_where_expected():
    expected = torch.tensor([1.0, -math.inf, math.nan])
    assert_close(expected.clone(), expected)
    for wrong in ([1.0, math.inf, math.nan], [1.0, -math.inf, 0.0], [math.nan, -math.inf, math.nan]):
        with pytest.raises(AssertionError, match="scores"):
            assert_close(torch.tensor(wrong), expected, name="scores")


def test_shapes_and_integers_must_be_equal():
    with pytest.raises(AssertionError, match=r"ids: shape \[2\], expected \[1, 2\]"):
        assert_close(torch.zeros(2), torch.zeros(1, 2), name="ids")
    with pytest.raises(AssertionError, match="1 of 3 elements differ, first found 4, expected 3"):
        assert_close(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]))


def test_zeros_found_for_values_and_values_found_for_zeros_are_errors():
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(3), torch.ones(3))
    with pytest.raises(AssertionError):
        assert_close(torch.ones(3), torch.zeros(3))


def test_experts_are_compared_as_sets_but_for_ties():
    logits, bias = torch.tensor([[0.0, 1.0, 2.0, 1.0000001]]), torch.zeros(4)
    assert same_experts(torch.tensor([[2, 3]]), logits, bias, 2)
    assert same_experts(torch.tensor([[1, 2]]), logits, bias, 2, tolerance=1e-5)
    assert not same_experts(torch.tensor([[1, 2]]), logits, bias, 2, tolerance=0.0)
    assert not same_experts(torch.tensor([[0, 2]]), logits, bias, 2)
    assert not same_experts(torch.tensor([[2, 2]]), logits, bias, 2)
    assert not same_experts(torch.tensor([[2, 4]]), logits, bias, 2)
    assert same_experts(torch.tensor([[0, 2]]), logits, torch.tensor([5.0, 0, 0, 0]), 2)


def test_slots_are_brought_into_the_found_order():
    found, known = torch.tensor([[5, 1], [2, 3]]), torch.tensor([[1, 5], [2, 3]])
    assert slots_like(found, known, torch.tensor([[10, 50], [20, 30]])).tolist() == [[50, 10], [20, 30]]
    with pytest.raises(AssertionError, match="other experts"):
        slots_like(torch.tensor([[5, 2]]), torch.tensor([[1, 5]]), torch.zeros(1, 2))
