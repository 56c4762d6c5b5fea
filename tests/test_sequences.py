"""Packing, splitting and batch forming: every token once, in order, whatever the lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kimicap.sequences import TableWriter, form_batches, make_sequences

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=12)


def sequences_of(rows, **how):
    writer = TableWriter()
    for number, ids in enumerate(rows):
        writer.add(2 * number + 1, np.array(ids))
    settings = {"seq_len": None, "split_long": False, "pack": False, "limit": None} | how
    return make_sequences(writer.finish(), empty_rows=0, cut_rows=0, special_ids=[], **settings)


@given(rows=ROWS, seq_len=st.integers(1, 12), limit=st.none() | st.integers(1, 5))
def test_split_rows(rows, seq_len, limit):
    sequences = sequences_of(rows, seq_len=seq_len, split_long=True, limit=limit)
    expected = [
        (2 * number + 1, start > 0, ids[start : start + seq_len])
        for number, ids in enumerate(rows)
        for start in range(0, len(ids), seq_len)
    ][:limit]
    found = [
        (int(sequences.rows[i]), sequences.continues(i), sequences.tokens(i).tolist()) for i in range(len(sequences))
    ]
    assert found == expected
    assert sequences.lengths.tolist() == [len(ids) for *_, ids in expected]


@given(rows=ROWS, seq_len=st.integers(1, 12), limit=st.none() | st.integers(1, 5))
def test_pack_rows(rows, seq_len, limit):
    sequences = sequences_of(rows, seq_len=seq_len, pack=True, limit=limit)
    flat = [(token, 2 * number + 1) for number, ids in enumerate(rows) for token in ids]
    windows = [flat[start : start + seq_len] for start in range(0, len(flat), seq_len)][:limit]
    found = [
        list(zip(sequences.tokens(i).tolist(), sequences.documents(i).tolist(), strict=True))
        for i in range(len(sequences))
    ]
    assert found == windows
    assert sequences.rows.tolist() == [window[0][1] for window in windows]
    assert sequences.lengths.tolist() == [len(window) for window in windows]


@given(
    lengths=st.lists(st.integers(1, 50), max_size=30),
    batch_tokens=st.integers(1, 200),
    batch_size=st.none() | st.integers(1, 6),
    max_padding=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    data=st.data(),
)
def test_form_batches(lengths, batch_tokens, batch_size, max_padding, data):
    indices = data.draw(st.permutations(range(len(lengths))))
    indices = indices[: data.draw(st.integers(0, len(lengths)))]
    how = {"batch_tokens": batch_tokens, "batch_size": batch_size, "max_padding": max_padding}
    batches = form_batches(np.array(lengths, dtype=np.int32), indices, **how)
    assert sorted(i for batch in batches for i in batch) == sorted(indices)
    for batch in batches:
        padded = max(lengths[i] for i in batch) * len(batch)
        assert len(batch) == 1 or padded <= batch_tokens
        assert batch_size is None or len(batch) <= batch_size
        # Of small batches padding costs nothing.
        assert padded <= batch_tokens // 8 or padded - sum(lengths[i] for i in batch) <= max_padding * padded
    assert form_batches(lengths, reversed(indices), **how) == batches


def test_equal_lengths_fill_batches():
    assert form_batches([4] * 5, range(5), batch_tokens=8, batch_size=None) == [(0, 1), (2, 3), (4,)]
    assert form_batches([9, 2, 2], range(3), batch_tokens=8, batch_size=None) == [(0,), (1, 2)]
    assert form_batches([10, 9, 5], [2, 1, 0], batch_tokens=99, batch_size=None) == [(0, 1), (2,)]
