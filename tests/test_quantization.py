"""Quantized blocks: what comes back is quanto's own quantize -> dequantize of each block, bit for bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_cache.quantization import FORMATS, Quantized

from .fake_quantized import fake_quantized

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 63, 64, 65, 72, 80, 96, 128])
KINDS = st.sampled_from(FORMATS), st.sampled_from(["channel", "token"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def stored(codec, blocks):
    """What `codec` makes of blocks."""
    parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.parts(blocks.shape, blocks.dtype)]
    codec.encode(blocks, parts)
    return parts


def same(ours, theirs):
    return torch.equal(ours.nan_to_num(12345), theirs.nan_to_num(12345))


@settings(deadline=None, max_examples=200)
@given(*KINDS, DTYPES, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 5]), SIZES, SIZES, st.data())
def test_every_block_is_what_quanto_makes_of_it(name, axis, dtype, count, batch, heads, block_size, head_dim, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    blocks = torch.randn(count, batch, heads, block_size, head_dim, generator=generator)
    blocks[..., 0] *= 20  # a channel that stands out
    blocks = blocks.to(dtype)
    group_size = data.draw(st.sampled_from([16, 32, 64]))
    codec = Quantized(name, axis, group_size, block_size)
    states = torch.full(blocks.shape, torch.nan, dtype=dtype)
    codec.decode(stored(codec, blocks), states)
    for block, ours in zip(blocks, states, strict=True):
        if name in ("int4", "int2") and codec.parts((1, *block.shape), dtype)[1].nbytes == dtype.itemsize:
            continue  # a block of a single group: quanto takes its numbers one by one and divides by 0
        assert same(ours, fake_quantized(block, name, axis, group_size))
