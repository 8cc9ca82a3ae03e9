"""Masks that are never laid out whole: a mask of a million tokens has as many bytes for each query."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from nvme_cache.guards import module_above
from nvme_cache.stand_in import StandIn

Visible: TypeAlias = bool | torch.Tensor

_KEPT_NUMBERS = 8 << 20  # most that portions of one mask may take, kept for the next layer


@dataclass(frozen=True)
class MaskRule:
    """What transformers says which query may attend to which key; positions count from the first token of a sequence.

    Attributes:
        batch_size: Batch rows.
        q_length: Queries.
        kv_length: Keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        function: Of batch row, head, position of query and of key: whether the one may attend to the other.
        padding: `[batch, positions]`, False for keys that nobody may attend to; None if there are none.
        use_vmap: Whether `function` is for single numbers only.
        device: Where the model computes.
        dtype: Of the mask laid out: bool, True for what may be attended to, or a float that is added to scores.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    function: Callable[..., Any]
    padding: torch.Tensor | None
    use_vmap: bool
    device: torch.device
    dtype: torch.dtype = torch.bool
    _seen: dict[tuple[int, ...], Visible] = field(default_factory=dict, init=False)

    def visible(self, queries: slice, keys: slice) -> Visible:
        """Whether these queries may attend to these keys: all to all, none to any, or `[batch, 1, queries, keys]`."""
        place = queries.start, queries.stop, keys.start, keys.stop
        if (seen := self._seen.get(place)) is not None:  # every layer asks again
            return seen
        visible = self._visible(queries, keys)
        if isinstance(visible, bool) or self.batch_size * self.q_length * self.kv_length <= _KEPT_NUMBERS:
            self._seen[place] = visible
        return visible

    def _visible(self, queries: slice, keys: slice) -> Visible:
        if self.function is causal_mask_function:
            if self.kv_offset + keys.start > self.q_offset + queries.stop - 1:
                return False
            is_past = self.kv_offset + keys.stop - 1 <= self.q_offset + queries.start
            if is_past and not self._is_padded(keys):
                return True
        mask = self._mask(queries, keys)
        if mask.all():
            return True
        return mask if mask.any() else False

    @property
    def has_padding(self) -> bool:
        """Whether there are keys that nobody may attend to."""
        return self._is_padded(slice(0, self.kv_length))

    @cached_property
    def whole(self) -> torch.Tensor:
        """The mask laid out, `[batch, 1, q_length, kv_length]`, as "sdpa" gives it, or "eager" if it is a float."""
        mask = self._mask(slice(0, self.q_length), slice(0, self.kv_length))
        if self.dtype is torch.bool:
            return mask
        hidden = mask.new_full((), torch.finfo(self.dtype).min, dtype=self.dtype)
        return torch.where(mask, hidden.new_zeros(()), hidden)

    def _mask(self, queries: slice, keys: slice) -> torch.Tensor:
        mask = sdpa_mask(
            batch_size=self.batch_size,
            q_length=queries.stop - queries.start,
            kv_length=keys.stop - keys.start,
            q_offset=self.q_offset + queries.start,
            kv_offset=self.kv_offset + keys.start,
            mask_function=self.function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        assert mask is not None
        return mask

    def _is_padded(self, keys: slice) -> bool:
        first, end = self._padded
        return bool(self.kv_offset + keys.start < end and first < self.kv_offset + keys.stop)

    @cached_property
    def _padded(self) -> tuple[int, int]:
        """Positions between which all padding lies; equal if there is none. Asked once, since a device must answer."""
        end = self.kv_offset + self.kv_length
        if self.padding is None:
            return end, end
        gaps = (~self.padding[:, :end].all(0)).nonzero().flatten().tolist()
        if self.padding.shape[1] < end:  # what a mask is too short for counts as padding, upstream too
            gaps += [self.padding.shape[1], end - 1]
        return (gaps[0], gaps[-1] + 1) if gaps else (end, end)


class LazyMask(StandIn):
    """A mask that is a rule; queries cut out of it make another."""

    rule: MaskRule

    @classmethod
    def by(cls, rule: MaskRule) -> "LazyMask":
        """The mask `[batch, 1, q_length, kv_length]` of a rule."""
        mask = cls.of((rule.batch_size, 1, rule.q_length, rule.kv_length), rule.dtype, rule.device)
        mask.rule = rule
        return mask

    def laid_out(self) -> torch.Tensor:
        """The whole mask."""
        return self.rule.whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.slice.Tensor and isinstance(args[0], LazyMask) and not kwargs:
            mask, dim, start, stop, step = args + (0, None, None, 1)[len(args) - 1 :]
            first, end, _ = slice(start, stop).indices(mask.shape[dim])
            if step == 1 and (first, end) == (0, mask.shape[dim]):
                return mask
            if step == 1 and dim == 2:
                rule = mask.rule
                return cls.by(replace(rule, q_length=end - first, q_offset=rule.q_offset + first))
        return super().__torch_dispatch__(function, types, args, kwargs)


def streaming_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers asks for a mask when the model attends with "nvme_streaming".

    Returns:
        None where "sdpa" has none either: no padding, and a single query or no past. Else a `LazyMask`. A model that
        cannot attend with "sdpa" expects what "eager" gives, always a mask and one to be added.
    """
    model = module_above(sys._getframe(1))
    takes_bool = getattr(model, "_supports_sdpa", True)
    rule = MaskRule(
        batch_size, q_length, kv_length, int(q_offset), kv_offset, mask_function, attention_mask, use_vmap,
        torch.device(device), torch.bool if takes_bool else dtype,
    )  # fmt: skip
    is_global = local_size is None or kv_length < local_size
    is_plain = allow_is_causal_skip and (q_length == 1 or kv_length == q_length)
    if takes_bool and is_global and (is_plain or allow_is_bidirectional_skip) and not rule.has_padding:
        return None
    return LazyMask.by(rule)
