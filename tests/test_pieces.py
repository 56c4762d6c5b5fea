"""Pieces of one row laid side by side."""

import pytest
import torch

from kimicap.pieces import Piece, join

STATES = ("position", "head", "key_dim")


@pytest.mark.parametrize("steps", [1, 3])
def test_the_last_forwards_pieces_hold_for_every_slice_of_heads(steps):
    """As `states@last` while decoding, where the heads of a batch come in several slices."""
    pieces = [
        Piece(row=0, tensor=torch.full((1, 2, 3), 10.0 * step + head), slot=0, head=head)
        for step in range(steps)
        for head in (0, 2, 4)
    ]
    whole = join(pieces, STATES)
    assert whole.tensor.shape == (1, 6, 3)
    assert (whole.slot, whole.head, whole.complete) == (0, 0, True)
    assert whole.tensor[0, :, 0].tolist() == [10.0 * (steps - 1) + head for head in (0, 0, 2, 2, 4, 4)]


def test_positions_lie_where_their_slots_say():
    pieces = [Piece(row=1, tensor=torch.full((2, 1, 1), 1.0)), Piece(row=1, tensor=torch.full((1, 1, 1), 2.0), slot=2)]
    whole = join(pieces, STATES)
    assert whole.row == 1
    assert whole.tensor.flatten().tolist() == [1, 1, 2]


def test_keys_that_came_later_are_unseen_by_earlier_queries():
    pieces = [
        Piece(row=0, tensor=torch.zeros(1, 2, 2), unseen=-torch.inf),
        Piece(row=0, tensor=torch.ones(1, 1, 3), slot=2, unseen=-torch.inf),
    ]
    whole = join(pieces, ("head", "query", "key")).tensor
    assert whole[0].tolist() == [[0, 0, -torch.inf], [0, 0, -torch.inf], [1, 1, 1]]


def test_keys_that_no_wanted_query_saw():
    pieces = [Piece(row=0, tensor=torch.ones(1, 1, 2), unseen=-torch.inf)]
    whole = join(pieces, ("head", "query", "key"), keys=4).tensor
    assert whole[0, 0].tolist() == [1, 1, -torch.inf, -torch.inf]
