"""Exact attention over keys and values that come in portions, in any order (online softmax).

Each portion gives an output and the logarithm of its sum of exponentials; the outputs, weighted by those sums, add up
to what attending to everything at once gives (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867).

Queries of the heads that share a key head are folded: they attend together, so each key is read once for all of them.
"""

import math
from typing import TypeAlias

import torch

from . import kernels
from .kernels import Partial
from .masks import LazyMask, Visible

Mask: TypeAlias = torch.Tensor | None

_QUERIES = 512  # asked together whether a mask hides anything from them
_PENDING_NUMBERS = 1 << 20


class OnlineSoftmax:
    """Attention of some queries, portion by portion.

    Args:
        queries: `[batch, num_attention_heads, q_length, head_dim]`.
        num_key_value_heads: Heads of keys and values.
        scaling: What scores are multiplied by.
        kv_length: Keys in all.
        mask: Which keys a query may attend to: `[batch, 1 or heads, q_length, kv_length]`, bool, or numbers to add to
            scores. None for all, or, with several queries, all up to the query's own.
        is_causal: Whether None means the latter.
        bias: Numbers to add to scores besides, shaped alike.
        softcap: `scores = softcap * tanh(scores / softcap)`.

    Raises:
        ValueError: a mask or a bias is not for these queries and keys, or neither bool nor float.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        num_key_value_heads: int,
        scaling: float,
        kv_length: int,
        *,
        mask: Mask = None,
        is_causal: bool = True,
        bias: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        self._dtype = torch.promote_types(queries.dtype, torch.float32)
        batch_size, num_heads, *extents = queries.shape
        groups = num_heads // num_key_value_heads
        self._queries = queries.to(self._dtype).view(batch_size, num_key_value_heads, groups, *extents)
        self._kernel, self._softcap = kernels.Kernel(scaling, softcap), softcap
        self._q_length, self._kv_length = queries.shape[2], kv_length
        self._mask, self._bias = self._over_all(mask), self._over_all(bias)
        self._is_causal = mask is None and is_causal and self._q_length > 1
        self._partials: list[Partial] = []

    def _over_all(self, mask: Mask) -> Mask:
        """The same for every query and key."""
        extents = self._q_length, self._kv_length
        if mask is None or (isinstance(mask, LazyMask) and mask.shape[2:] == extents):
            return mask
        fits = all(size in (1, extent) for size, extent in zip(mask.shape[-2:], extents, strict=True))
        if not fits or not (mask.dtype is torch.bool or mask.is_floating_point()):
            raise ValueError(
                f"a mask of {tuple(mask.shape)} and {mask.dtype} is not for {extents[0]} queries and {extents[1]} keys"
            )
        return (mask.laid_out() if isinstance(mask, LazyMask) else mask).expand(*mask.shape[:-2], *extents)

    def add(self, keys: torch.Tensor, values: torch.Tensor, start: int, rows: torch.Tensor | None) -> None:
        """Attends to a portion.

        Args:
            keys: `[stored rows, num_key_value_heads, length, head_dim]`.
            values: `[stored rows, num_key_value_heads, length, value_dim]`.
            start: Position of its first token among all keys.
            rows: For each batch row which stored one it attends to, on CPU; None if they are the same.
        """
        num_queries = self._queries.shape[2] * self._q_length
        fused = kernels.is_fused(keys, values, num_queries, self._softcap)
        for first, end in kernels.stretches(keys, values, num_queries, fused=fused):
            part = keys[:, :, first:end], values[:, :, first:end]
            self._partials.append(self._partial(*part, start + first, rows, fused=fused))
            if sum(output.numel() for output, _ in self._partials) > _PENDING_NUMBERS:
                self._partials = [kernels.merged(self._partials)]

    def result(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """The output, `[batch, q_length, num_attention_heads, value_dim]`, in the computing dtype.

        Args:
            sinks: `[num_attention_heads]`, scores of a key without a value that every query attends to.
        """
        if sinks is None:
            output = kernels.combined(self._partials)
        else:
            output, totals = (part.squeeze(2) for part in kernels.merged(self._partials))
            scores = sinks.to(self._dtype).view(1, *self._queries.shape[1:3], 1)
            output = output * (totals - torch.logaddexp(totals, scores)).exp().unsqueeze(-1)
        return output.flatten(1, 2).transpose(1, 2).contiguous()

    def _partial(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, rows: torch.Tensor | None, *, fused: bool
    ) -> Partial:
        """Output `[batch, num_key_value_heads, parts, groups, q_length, value_dim]` and totals of one stretch."""
        own = slice(start, start + keys.shape[2])
        ranges = self._ranges(own, self._queries.shape[1] * keys.shape[0], fused=fused)
        if len(ranges) == 1 and ranges[0][0] == slice(0, self._q_length):
            return self._of_rows(keys, values, own, *ranges[0], rows)
        shape = (*self._queries.shape[:2], 1, *self._queries.shape[2:4], values.shape[3])
        output = torch.zeros(shape, dtype=self._dtype, device=keys.device)
        totals = torch.full(shape[:5], -math.inf, dtype=self._dtype, device=keys.device)
        for queries, visible in ranges:
            part = kernels.merged([self._of_rows(keys, values, own, queries, visible, rows)])
            output[:, :, :, :, queries], totals[:, :, :, :, queries] = part
        return output, totals

    def _ranges(self, keys: slice, num_heads: int, *, fused: bool) -> list[tuple[slice, Visible]]:
        """Queries that may attend to any of these keys, with to which; as few at once as fit in memory."""
        limit = kernels.queries_at_once(num_heads * self._queries.shape[2], keys.stop - keys.start)
        step = min(_QUERIES, limit)
        ranges: list[tuple[slice, Visible]] = []
        for first in range(0, self._q_length, step):
            queries = slice(first, min(first + step, self._q_length))
            visible = self._visible(queries, keys)
            joins = visible is True and ranges and ranges[-1][1] is True and ranges[-1][0].stop == first
            if joins and fused and self._bias is None:
                ranges[-1] = slice(ranges[-1][0].start, queries.stop), True
            elif visible is not False:
                ranges.append((queries, visible))
        return ranges

    def _visible(self, queries: slice, keys: slice) -> Visible:
        if isinstance(self._mask, LazyMask):
            return self._mask.rule.visible(queries, keys)
        if self._mask is not None:
            return self._mask[:, :, queries, keys]
        if self._is_causal:
            past = self._kv_length - self._q_length
            if keys.start > past + queries.stop - 1:
                return False
            if keys.stop - 1 > past + queries.start:
                at = torch.arange(queries.start, queries.stop, device=self._queries.device) + past
                return at[:, None] >= torch.arange(keys.start, keys.stop, device=self._queries.device)
        return True

    def _of_rows(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: slice,
        queries: slice,
        visible: Visible,
        rows: torch.Tensor | None,
    ) -> Partial:
        part = self._queries[:, :, :, queries]
        bias = self._added(visible, queries, own)
        if rows is None:
            return self._folded(part, keys, values, bias)
        shape = (*part.shape[:2], 1, *part.shape[2:4])
        output, totals = part.new_empty((*shape, values.shape[3])), part.new_empty(shape)
        for stored in rows.unique().tolist():
            mine = (rows == stored).nonzero().flatten().to(part.device)
            near = bias if bias is None or bias.shape[0] == 1 else bias[mine]
            own_keys, own_values = keys[stored : stored + 1], values[stored : stored + 1]
            # Batch rows that share a stored one are folded as heads that share keys are.
            folded = part[mine].permute(1, 2, 0, 3, 4).flatten(1, 2).unsqueeze(0)
            if near is not None:
                near = self._of_groups(near).expand(len(mine), -1, -1, -1, -1).permute(1, 2, 0, 3, 4)
                near = near.flatten(1, 2).unsqueeze(0)
            one, sums = kernels.merged([self._folded(folded, own_keys, own_values, near)])
            groups = (part.shape[2], len(mine))
            output[mine] = one[0].unflatten(2, groups).permute(3, 0, 1, 2, 4, 5)
            totals[mine] = sums[0].unflatten(2, groups).permute(3, 0, 1, 2, 4)
        return output, totals

    def _folded(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> Partial:
        """Of queries `[batch, num_key_value_heads, groups, q_length, head_dim]`; output and totals as `_partial`."""
        if bias is not None:
            bias = bias if bias.ndim == 5 else self._of_groups(bias)
            bias = bias.expand(-1, -1, *queries.shape[2:4], -1).flatten(2, 3)
        output, totals = self._kernel.attend(queries.flatten(2, 3), keys, values, bias)
        shape = *totals.shape[:3], *queries.shape[2:4]
        return output.view(*shape, output.shape[4]), totals.view(shape)

    def _of_groups(self, bias: torch.Tensor) -> torch.Tensor:
        """`[batch, 1 or heads, ...]` as `[batch, 1 or num_key_value_heads, 1 or groups, ...]`."""
        if bias.shape[1] == 1:
            return bias.unsqueeze(2).expand(-1, -1, self._queries.shape[2], -1, -1)
        heads, groups = self._queries.shape[1:3]
        return bias.view(bias.shape[0], heads, groups, *bias.shape[2:])

    def _added(self, visible: Visible, queries: slice, keys: slice) -> torch.Tensor | None:
        """What to add to the scores of these queries and keys."""
        bias = None if self._bias is None else self._bias[:, :, queries, keys].to(self._dtype)
        if isinstance(visible, bool):
            return bias
        if visible.dtype == torch.bool:
            hidden = visible.new_zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, -math.inf)
        else:
            hidden = visible.to(self._dtype)
        hidden = hidden if hidden.ndim == 4 else hidden[None, None]
        return hidden if bias is None else bias + hidden
