"""Tokens map into blocks and back without loss, for any shape; cuts cover what they name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvme_cache.blocks import cut, merged_rows, pack, unpack

small = st.integers(1, 4)


@given(small, small, small, st.integers(1, 5), st.integers(1, 7), st.data())
def test_pack_then_unpack_is_the_identity(batch, heads, width, num_pieces, piece_length, data):
    length = num_pieces * piece_length
    states = torch.randn(batch, length, heads, width).transpose(1, 2)  # strided, as models give them
    blocks = torch.full((num_pieces, batch, heads, piece_length, width), torch.nan)
    split = data.draw(st.integers(0, length))
    for part, start in ((states[:, :, :split], 0), (states[:, :, split:], split)):
        for target, source in pack(blocks, start, part):
            target.copy_(source)
    for token in range(length):
        assert torch.equal(blocks[token // piece_length, :, :, token % piece_length], states[:, :, token])

    kept = data.draw(st.integers(0, length))
    rows = data.draw(st.none() | st.lists(st.integers(0, batch - 1), min_size=1, max_size=5).map(torch.tensor))
    expected = states[:, :, :kept] if rows is None else states[rows, :, :kept]
    unpacked = torch.full(expected.shape, torch.nan)
    for target, where in unpack(unpacked, piece_length, rows):
        target.copy_(blocks[where][:, :, :, : target.shape[3]])
    assert torch.equal(unpacked, expected)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_cut_takes_the_tokens_named(lengths, data):
    states = torch.arange(sum(lengths)).view(1, 1, -1, 1)
    parts = [(part, -part) for part in states.split(lengths, dim=2)]
    start = data.draw(st.integers(0, sum(lengths)))
    length = data.draw(st.integers(0, sum(lengths) - start))
    keys = torch.cat([states[:, :, :0]] + [part[0] for part in cut(parts, start, length)], dim=2)
    values = torch.cat([states[:, :, :0]] + [part[1] for part in cut(parts, start, length)], dim=2)
    assert torch.equal(keys, states[:, :, start : start + length])
    assert torch.equal(values, -keys)


class TestMergedRows:
    def test_rows_that_are_the_same_are_there_once(self):
        keys, values = torch.randn(2, 5, 2, 7, 4)
        for part in (keys, values):
            part[2], part[4] = part[0], part[1]
        parts = [(keys[:, :, :3], values[:, :, :3]), (keys[:, :, 3:], values[:, :, 3:])]
        merged, rows = merged_rows(parts)
        assert rows.tolist() == [0, 1, 0, 2, 1]
        for (before, after), kept in zip(zip(parts, merged, strict=True), (slice(0, 3), slice(3, 7)), strict=True):
            assert before[0].shape[2] == kept.stop - kept.start
            assert all(torch.equal(new[rows], old) for new, old in zip(after, before, strict=True))

    def test_of_rows_that_differ_anywhere_nothing_changes(self):
        for place in ((0, 0), (6, 3)):
            keys, values = torch.zeros(2, 3, 2, 7, 4)
            keys[1, 1, place[0], place[1]], values[2, 0, place[0], place[1]] = 1, 1
            merged, rows = merged_rows([(keys, values)])
            assert rows is None and merged[0][0] is keys

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
    def test_zeros_of_another_sign_are_not_the_same(self, dtype):
        keys = torch.zeros(2, 1, 7, 4)
        keys[1] = -0.0
        assert merged_rows([(keys.to(dtype), keys.to(dtype))])[1] is None
