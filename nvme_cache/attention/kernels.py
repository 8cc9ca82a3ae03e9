"""Kernels: attention over a stretch of keys and values, with what it takes to merge it with others.

They compute in float32 at least, whatever keys and values are stored as. Fused kernels round their output to the dtype
of their inputs; merging outputs so rounded would double the error of attending at once. Where a processor attends, its
caches hold a stretch while it is converted and read, so that float32 costs no time. Only the many queries of prompts on
CUDA, which need its matrix units, are rounded in between.
"""

import math
import threading
from collections.abc import Iterator
from typing import TypeAlias

import torch

from nvme_cache.states import States
from nvme_cache.transfer import transfer_for

Partial: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_own = threading.local()

_STRETCH_BYTES = 8 << 20  # of float32 keys and values: what a processor's last cache holds beside other things
_DEVICE_STRETCH_BYTES = 128 << 20
_SCORES_BYTES = 32 << 20
_MANY_QUERIES = 128
_LEAST_SPLIT = 256  # tokens
_GRANULE = 256  # tokens


def is_fused(keys: torch.Tensor, values: torch.Tensor, num_queries: int, softcap: float | None) -> bool:
    """Whether scores of that many queries need not be held in memory, unless there is a bias."""
    widths = keys.shape[3], values.shape[3]
    if softcap is not None or keys.dtype != values.dtype:
        return False
    if keys.device.type == "cuda":
        return num_queries >= _MANY_QUERIES and keys.dtype.itemsize == 2 and not any(width % 8 for width in widths)
    return keys.device.type == "cpu" and widths[0] == widths[1]


def stretches(keys: torch.Tensor, values: torch.Tensor, num_queries: int, *, fused: bool) -> Iterator[tuple[int, int]]:
    """First and last tokens of the stretches to attend to, one after the other.

    Args:
        keys: `[batch, heads, length, head_dim]`.
        values: Likewise; heads may be as wide as they like.
        num_queries: Queries of each of these heads.
        fused: As `is_fused` says.
    """
    token_bytes = 4 * keys.shape[0] * keys.shape[1] * (keys.shape[3] + values.shape[3])
    count = (_STRETCH_BYTES if keys.device.type == "cpu" else _DEVICE_STRETCH_BYTES) // token_bytes
    if not fused:
        count = min(count, _SCORES_BYTES // (4 * keys.shape[0] * keys.shape[1] * min(num_queries, _GRANULE)))
    length, most = keys.shape[2], max(1, count // _GRANULE) * _GRANULE
    count = -(-length // -(-length // most))  # all of about one size
    count = -(-count // _GRANULE) * _GRANULE
    for start in range(0, length, count):
        yield start, min(start + count, length)


def queries_at_once(num_heads: int, num_keys: int) -> int:
    """How many queries of `num_heads` heads may have their scores, or a mask, in memory."""
    return max(1, _SCORES_BYTES // (4 * num_heads * num_keys))


class Kernel:
    """Attention of one layer's queries over stretches of its keys and values.

    Args:
        scaling: What scores are multiplied by.
        softcap: `scores = softcap * tanh(scores / softcap)` before a bias is added; None for no such limit.
    """

    def __init__(self, scaling: float, softcap: float | None = None) -> None:
        self._scaling, self._softcap = scaling, softcap

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Partial:
        """Attention over one stretch.

        Args:
            queries: `[batch, heads, num_queries, head_dim]`, float32 or float64.
            keys: `[batch, heads, length, head_dim]`, any dtype.
            values: `[batch, heads, length, value_dim]`, any dtype.
            bias: What is added to scores, `[batch, 1 or heads, num_queries, length]`, of the queries' dtype.

        Returns:
            The output, `[batch, heads, parts, num_queries, value_dim]`, and the logarithm of the sum of exponentials of
            scores, `[batch, heads, parts, num_queries]`: -inf, with an output of 0, where the bias leaves nothing. Each
            part is of another share of the tokens.
        """
        fused = is_fused(keys, values, queries.shape[2], self._softcap)
        if fused and bias is None and keys.device.type == "cuda":
            return _efficient(queries, keys, values, self._scaling)
        if fused and keys.device.type == "cpu":
            return _flash(queries, keys, values, self._scaling, bias)
        near_keys, near_values = _converted(keys, values, queries.dtype)
        scores = torch.matmul(queries * self._scaling, near_keys.transpose(2, 3))
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if bias is not None:
            scores += bias
        largest = _finite(scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        sums = weights.sum(-1, keepdim=True)
        output = torch.matmul(weights, near_values).div_(sums.masked_fill(sums == 0, 1))
        return output.unsqueeze(2), sums.log_().add_(largest).squeeze(-1).unsqueeze(2)


def merged(partials: list[Partial]) -> Partial:
    """What attending to everything at once would have given: one part, with its total."""
    outputs, totals = (torch.cat(parts, dim=2) for parts in zip(*partials, strict=True))
    largest = _finite(totals.amax(2, keepdim=True))
    total = (totals - largest).exp_().sum(2, keepdim=True).log_().add_(largest)
    return _combined(outputs, totals).unsqueeze(2), total


def combined(partials: list[Partial]) -> torch.Tensor:
    """The output alone, `[batch, heads, num_queries, value_dim]`."""
    return _combined(*(torch.cat(parts, dim=2) for parts in zip(*partials, strict=True)))


def _combined(outputs: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    if totals.shape[2] == 1:
        return outputs.squeeze(2)
    weights = totals.softmax(2).nan_to_num_(0.0)  # NaN where nothing is left to attend to
    return outputs.mul_(weights.unsqueeze(-1)).sum(2)


def _converted(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> States:
    if keys.device.type != "cpu" or (keys.dtype == dtype and values.dtype == dtype):
        return keys.to(dtype), values.to(dtype)
    # The same memory for every stretch: it stays in the processor's caches, and no page of it is new.
    middle = keys.numel() * dtype.itemsize
    end = middle + values.numel() * dtype.itemsize
    memory: torch.Tensor | None = getattr(_own, "memory", None)
    if memory is None or memory.numel() < end:
        memory = _own.memory = transfer_for(keys.device).host_memory(end)
    near_keys = memory[:middle].view(dtype).view(keys.shape).copy_(keys)
    return near_keys, memory[middle:end].view(dtype).view(values.shape).copy_(values)


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """With 0 for -inf, of which nothing can be taken away."""
    return largest.masked_fill_(largest == -math.inf, 0)


def _efficient(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Partial:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    output, totals, *_ = efficient(queries.to(keys.dtype), keys, values, None, True, scale=scaling)
    totals = totals[:, :, : queries.shape[2]]  # it pads them
    return output.to(queries.dtype).unsqueeze(2), totals.to(queries.dtype).unsqueeze(2)


def _flash(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, bias: torch.Tensor | None
) -> Partial:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if bias is not None:
        output, totals = flash(queries, *_converted(keys, values, queries.dtype), attn_mask=bias, scale=scaling)
        totals = totals.masked_fill((bias == -math.inf).all(-1), -math.inf)  # it says 0 there
        return output.unsqueeze(2), totals.unsqueeze(2)
    # Each head of each row is one thread's work. Where there are too few of them, tokens are split too, the outermost
    # dimension of all: then the share of the converted memory that a thread fills is the share that it reads, and
    # nothing has to go from one core's cache to another's, which can cost more than everything else here.
    batch_size, num_heads, length, width = keys.shape
    wanted = -(-2 * torch.get_num_threads() // (num_heads * -(-queries.shape[2] // 32)))
    splits = 1 << (wanted - 1).bit_length()
    while splits > 1 and (length % splits or length // splits < _LEAST_SPLIT or batch_size > 1):
        splits //= 2
    if splits == 1:
        output, totals = flash(queries, *_converted(keys, values, queries.dtype), scale=scaling)
        return output.unsqueeze(2), totals.unsqueeze(2)
    shape = num_heads, splits, length // splits, width
    near_keys, near_values = (part[0].view(shape).transpose(0, 1) for part in (keys, values))
    shares = _converted(near_keys, near_values, queries.dtype)
    output, totals = flash(queries.expand(splits, -1, -1, -1), *shares, scale=scaling)
    return output.transpose(0, 1).unsqueeze(0), totals.transpose(0, 1).unsqueeze(0)
