"""The reference for quantized caches: transformers' own cache, with what ours would have sealed replaced by what quanto
makes of it, block by block, `quantize_weight(...).dequantize()`.
"""

import torch
from optimum import quanto
from optimum.quanto import quantize_weight
from optimum.quanto.tensor.grouped import ungroup
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from nvme_cache.quantization import QuantizationConfig, nearest_divisor


def fake_quantized(block, name, axis, q_group_size):
    """A block, `[batch, heads, block_size, head_dim]`, quantized and dequantized by quanto.

    A channel's groups run along the tokens: `[block_size, batch * heads * head_dim]` and axis -1. A token's run along
    the channels: `[batch * heads * block_size, head_dim]` and axis 0.
    """
    if name is None or not block.numel():
        return block
    by_channel = axis == "channel"
    matrix = block.permute(2, 0, 1, 3).flatten(1) if by_channel else block.flatten(0, 2)
    matrix, quanto_axis = matrix.contiguous(), -1 if by_channel else 0
    qtype = quanto.qfloat8_e4m3fn if name == "float8" else getattr(quanto, f"q{name}")
    if qtype.bits == 8:
        scale = quanto.AbsmaxOptimizer()(matrix, qtype, quanto_axis)
        quantized = quantize_weight(matrix, qtype, quanto_axis, scale, optimized=False)
        result = quantized.dequantize()
    else:
        group_size = nearest_divisor(matrix.shape[0 if by_channel else 1], q_group_size)
        scale, shift = quanto.MaxOptimizer()(matrix, qtype, quanto_axis, group_size)
        quantized = quantize_weight(matrix, qtype, quanto_axis, scale, shift, group_size, optimized=False)
        result = _dequantize(quantized)
    if by_channel:
        batch, heads, block_size, head_dim = block.shape
        return result.view(block_size, batch, heads, head_dim).permute(1, 2, 0, 3)
    return result.view(block.shape)


def _dequantize(quantized):
    """`quantized.dequantize()` but for the unpacking, which quanto compiles when it is first called."""
    packed, bits = quantized._data, quantized._data._bits
    codes = torch.cat([packed._data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])[: packed.shape[0]]
    grouped = quantized._scale * codes - quantized._shift
    return ungroup(grouped, quantized.axis, quantized.shape)


class FakeQuantizedLayer(DynamicLayer):
    """Seals what `NVMeLayer` would, when it would.

    A token is exact in what the update that seals it returns, and quantized from the next one on; the first
    `sink_tokens` stay exact. Everything else is upstream's: rows and tokens are taken from what is quantized already.
    """

    def __init__(self, block_size, quantization):
        super().__init__()
        self._block_size, self._quantization, self._sealed = block_size, quantization, 0

    def update(self, key_states, value_states, *args, **kwargs):
        tail = self.get_seq_length() - self._sealed
        returned = super().update(key_states, value_states, *args, **kwargs)
        # Fewer new tokens than a block are sealed when the next arrive: until then they may be taken back.
        self._seal(tail + (key_states.shape[2] if key_states.shape[2] >= self._block_size else 0))
        return returned

    @torch.no_grad()
    def _seal(self, available):
        size, config = self._block_size, self._quantization
        sinks = max(0, config.sink_tokens - self._sealed)
        count = (available - sinks) // size
        if count <= 0:
            return
        start = self._sealed + sinks
        self._sealed = start + count * size
        self.keys = self._with_blocks(self.keys, start, config.key, config.axis_key)
        self.values = self._with_blocks(self.values, start, config.value, config.axis_value)

    def _with_blocks(self, states, start, name, axis):
        states = states.clone()  # what was returned shows them as they were
        for block in states[:, :, start : self._sealed].split(self._block_size, dim=2):
            block.copy_(fake_quantized(block, name, axis, self._quantization.q_group_size))
        return states

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self._sealed = min(self._sealed, self.get_seq_length())

    def reset(self):
        super().reset()
        self._sealed = 0


class FakeQuantizedCache(DynamicCache):
    """A `DynamicCache` whose layers of full attention are quantized as ours would be; without a config, all are."""

    def __init__(self, config, block_size, quantization):
        if isinstance(quantization, str):
            quantization = QuantizationConfig(key=quantization, value=quantization)

        def layer():
            return FakeQuantizedLayer(block_size, quantization)

        super().__init__(config=config)
        self.layers = [layer() if type(each) is DynamicLayer else each for each in self.layers]
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = layer
