"""NVMeLayer: one full-attention layer of the cache, its sealed runs and its tail."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from .blocks import BlockRun, cut, merged_rows
from .errors import CacheMisuseError
from .history import History, Tail
from .laid_out import LaidOutMixin
from .pager import Pager
from .placement import Tier
from .segments import Segment, segments_of
from .shards import dtype_name
from .slots import Lease
from .states import LayerSpec, States, joined


class NVMeLayer(LaidOutMixin, CacheLayerMixin):
    """Full attention whose history is paged.

    Tokens older than the tail live in immutable runs of blocks. Cropping, reordering, repeating and selecting are work
    on indices: no sealed byte is read, written or moved for them.

    Args:
        pager: What moves the blocks.
        layer_idx: The layer's place in the model.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, pager: Pager, layer_idx: int) -> None:
        self._pager = pager
        self.layer_idx = layer_idx
        self.is_streamed, self.can_stream = False, True
        self._segmented: tuple[Any, list[Segment]] = None, []
        self._clear()
        pager.register(self)

    def _clear(self) -> None:
        self.is_initialized = False
        self._history: History | None = None
        self._lease: Lease | None = None
        self._update_length = 1
        self._is_settled = True
        self._assigned: dict[int, torch.Tensor] = {}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes shapes, dtypes and device from the first states, `[batch, heads, seq_length, head_dim]` each.

        Raises:
            ConfigurationError: a dtype that shards cannot hold.
        """
        self._spec = LayerSpec.of(key_states, value_states)
        for kind in (self._spec.keys, self._spec.values):
            dtype_name(kind.dtype)
        self.device = key_states.device
        self.batch_size = key_states.shape[0]
        self._history = History((), 0, self._new_tail([]))
        self.is_initialized = True

    def restore(
        self, spec: LayerSpec, batch_size: int, runs: Sequence[BlockRun], tail: States, device: torch.device
    ) -> None:
        """Takes over what another layer held; the first update moves it to the device it is on."""
        self._spec, self.batch_size, self.device = spec, batch_size, device
        self._history = History(tuple(runs), sum(run.length for run in runs), self._new_tail([tail]))
        self._is_settled, self.is_initialized = False, True

    @property
    def spec(self) -> LayerSpec:
        """Heads, widths and dtypes of what the layer holds."""
        return self._spec

    @property
    def held(self) -> tuple[LayerSpec, History] | None:
        """What the layer holds; None if there are no tokens."""
        return None if self._history is None or self._history.length == 0 else (self._spec, self._history)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens and returns all there are, `[batch, heads, seq_length, head_dim]` each, on the layer's device.

        What is returned stays valid until the layer's next update. The first tokens come back as they were given. With
        gradients enabled the rest is a copy, through which gradients reach the new tokens.

        Raises:
            NVMeCacheError: what went wrong in the background, or misuse; the layer is as it was.
        """
        self.prepare(key_states, value_states)
        return self.extend(key_states, value_states)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[list[Segment], list[States]]:
        """The second half of `update` where attention reads a segment at a time.

        Returns:
            The segments of what was sealed before, and the tokens behind them, in memory.
        """
        assert self._history is not None
        segments, tail = self.segments, self._history.tail
        self._abandon_slot()
        new = key_states.detach(), value_states.detach()
        with torch.no_grad():
            self._append(new)
        tail.exposed = tail.length
        recent = [tail.states(), new] if tail is not self._history.tail else [tail.states()]
        return segments, [states for states in recent if states[0].shape[2]]

    @property
    def segments(self) -> list[Segment]:
        """What is sealed, in the portions in which attention reads it, and in that order."""
        if self._history is None:
            return []
        held, known = self._segmented
        if held is not self._history:  # asked for again and again
            self._segmented = self._history, segments_of(self._history.runs, self._spec, self.device, known)
        return self._segmented[1]

    def stop_streaming(self) -> None:
        """From the next update on the layer is laid out whole."""
        self.can_stream = False

    def extend(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The second half of `update`, after `prepare` with the same states."""
        past = self.get_seq_length()
        length = past + key_states.shape[2]
        new = key_states.detach(), value_states.detach()
        if past == 0:
            self._abandon_slot()  # after a crop to nothing one may still be held, without what is appended now
            with torch.no_grad():
                self._append(new)
            return key_states, value_states
        slot, sealed_length = self._complete_slot(), self._sealed_length
        with torch.no_grad():
            self._append(new)
            slot.append(new)
            keys, values = slot.states(length)
        if torch.is_grad_enabled():
            keys, values = joined(keys[:, :, :past], key_states), joined(values[:, :, :past], value_states)
        if self._sealed_length > sealed_length and not self._pager.is_exact:
            self._abandon_slot()  # from the next update on, what was sealed just now is what it was stored as
        return keys, values

    def prepare(self, key_states: torch.Tensor, value_states: torch.Tensor, *, lay_out: bool = True) -> None:
        """The first half of `update`: sees to it that the layer's history is in a slot, fetching it or waiting for it.

        Args:
            key_states: As for `update`.
            value_states: As for `update`.
            lay_out: False if attention reads a segment at a time, so that no slot is needed.

        Raises:
            NVMeCacheError: as `update`.
        """
        self._pager.check()
        if self._assigned:
            raise CacheMisuseError(
                f"layer {self.layer_idx} was assigned keys or values alone; assign both before the next update"
            )
        past, spec = self.get_seq_length(), LayerSpec.of(key_states, value_states)
        if past == 0:
            if not self.is_initialized or self._differs(spec, key_states):
                self.lazy_initialization(key_states, value_states)
        else:
            self._settle(key_states.device)
            self._check(spec, key_states)
            if spec != self._spec and (promoted := self._spec.promoted(spec)) != self._spec:
                self._convert(promoted)
            if lay_out:
                self.is_streamed = False
                self._fill_slot(past + key_states.shape[2])
        self._update_length = key_states.shape[2] if past else 1  # a prompt, or the first chunk of one, tells nothing

    def undo(self) -> Callable[[], None]:
        """What takes the next update back, whatever it will have done."""
        length = self.get_seq_length()
        # Cropping leaves what was sealed as it was stored, which is good enough only if that is exact.
        held = (self._history, self._spec, self.batch_size) if length and not self._pager.is_exact else None

        def take_back() -> None:
            added = self.get_seq_length() - length
            if held is None or held[0] is self._history or added < 0:  # a closed cache holds less than before
                self.crop(min(0, -added))
            else:
                self._abandon_slot()
                self._history, self._spec, self.batch_size = held

        return take_back

    @property
    def sealed_nbytes(self) -> int:
        """Size in bytes of all sealed blocks, as stored."""
        return self.used_bytes().total()

    def get_seq_length(self) -> int:
        """How many tokens the layer holds."""
        return 0 if self._history is None else self._history.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` will return for `query_length` new tokens."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def used_bytes(self) -> Counter[Tier]:
        """Bytes of sealed blocks by tier, as stored."""
        return Counter() if self._history is None else self._history.used_bytes

    def tail_bytes(self) -> int:
        """Bytes of the tokens in the tail."""
        return 0 if self._history is None else self._spec.nbytes(self._history.tail.length) * self.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest `-tokens_to_remove` tokens, all if there are fewer.

        Raises:
            ValueError: `tokens_to_remove` is positive, as upstream.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor in some versions
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported; pass the number of tokens to remove as a negative integer"
            )
        if tokens_to_remove == 0 or self._history is None:
            return
        length = max(0, self._history.length + tokens_to_remove)
        if length >= self._history.sealed_length:
            self._history.tail.length = length - self._history.sealed_length
        else:
            self._history = History(self._history.cropped_runs(length), length, self._new_tail([]))
        if self._lease is not None and self._lease.is_valid:
            self._lease.slot.filled = min(self._lease.slot.filled, length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row `i` what row `beam_idx[i]` was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row `repeats` times, copies side by side."""
        if self.is_initialized:
            self._select_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keeps the batch rows at `indices`, in that order; a mask works too."""
        self._select_rows(torch.as_tensor(indices))

    def reset(self) -> None:
        """Forgets every token."""
        self._abandon_slot()
        self._clear()

    def offload(self) -> None:
        """Nothing to do: sealed blocks are where the placement put them."""

    def prefetch(self) -> None:
        """Nothing to do: the cache fetches ahead by itself."""

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys, `[batch, heads, seq_length, head_dim]`; None before the first update. Reads every block.

        Keys and values may be assigned, both: then they replace what the layer holds.
        """
        return self._assigned[0] if 0 in self._assigned else self._loaded(0)

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._assign(0, states)

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of all values, as `keys`."""
        return self._assigned[1] if 1 in self._assigned else self._loaded(1)

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._assign(1, states)

    def __deepcopy__(self, memo: dict[int, Any]) -> "NVMeLayer":
        """A layer with its own tail that shares the sealed blocks, which never change."""
        copied = NVMeLayer(memo.get(id(self._pager), self._pager), self.layer_idx)
        memo[id(self)] = copied
        if self._history is not None:
            copied._spec, copied.device, copied.batch_size = self._spec, self.device, self.batch_size
            copied._history = replace(self._history, tail=copied._new_tail([self._history.tail.states()]))
            copied._update_length, copied._is_settled = self._update_length, self._is_settled
            copied.can_stream = self.can_stream
            copied.is_initialized = True
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError("a paged layer cannot be pickled: its blocks live in files and threads of this process")

    @property
    def _sealed_length(self) -> int:
        return 0 if self._history is None else self._history.sealed_length

    def _append(self, states: States) -> None:
        """Seals what is due, then puts the rest into the tail.

        A long update is sealed at once, so that a prompt leaves memory while it is processed. A short one is sealed
        when the next arrives: until then speculative decoding may take its tokens back.
        """
        assert self._history is not None
        history = self._history
        sealed_length, tail = history.sealed_length, history.tail
        count = states[0].shape[2]
        is_long = count >= self._pager.block_size
        due = self._pager.sealable(sealed_length, tail.length + (count if is_long else 0))
        if not due:
            tail.append(states)
            return
        pending = [tail.states(), states]
        # Rows that are the same are stored, and read, once. Only a prompt's are: beams go their own ways.
        to_seal, rows = merged_rows(cut(pending, 0, due)) if is_long else (cut(pending, 0, due), None)
        sealed = self._pager.seal(self, self._spec, to_seal, first_token=sealed_length)
        sealed = sealed if rows is None else [run.with_rows(rows) for run in sealed]
        # A new tail: copies out of the old one's memory may still be under way.
        rest = self._new_tail(cut(pending, due, tail.length + count - due))
        self._history = History((*history.runs, *sealed), sealed_length + due, rest)

    def _new_tail(self, parts: list[States]) -> Tail:
        tail = Tail(self._spec, self.batch_size, self._pager.tail_capacity, self.device)
        for part in parts:
            tail.append(part)
        return tail

    def _select_rows(self, index: torch.Tensor) -> None:
        if self._history is None or self._history.length == 0:
            return
        rows = torch.arange(self.batch_size, device="cpu")[index.cpu()]
        if rows.shape[0] == 0:
            self.reset()
            return
        self._abandon_slot()
        parts = self._history.tail.states()
        self.batch_size = rows.shape[0]
        tail = self._new_tail([(parts[0][rows.to(self.device)], parts[1][rows.to(self.device)])])
        self._history = History(self._history.selected_runs(rows), self._history.sealed_length, tail)

    def _convert(self, spec: LayerSpec) -> None:
        """Goes on in wider dtypes, as concatenating the old and the new would."""
        assert self._history is not None
        self._abandon_slot()
        self._spec = spec
        self._history = replace(self._history, tail=self._new_tail([self._history.tail.states()]))

    def _settle(self, device: torch.device) -> None:
        if self._history is not None and not self._is_settled and device != self.device:
            self._abandon_slot()
            self.device, tail = device, self._history.tail
            runs = tuple(run.on_device(device) for run in self._history.runs)
            self._history = History(runs, self._history.sealed_length, self._new_tail([tail.states()]))
        self._is_settled = True

    def _differs(self, spec: LayerSpec, key_states: torch.Tensor) -> bool:
        return (spec, key_states.shape[0], key_states.device) != (self._spec, self.batch_size, self.device)

    def _check(self, spec: LayerSpec, key_states: torch.Tensor) -> None:
        shape, held = (key_states.shape[0], *spec.extents), (self.batch_size, *self._spec.extents)
        if shape != held:
            raise CacheMisuseError(
                f"layer {self.layer_idx} holds keys and values of (batch, heads, widths) {held} but was given "
                f"{shape}. Use a new cache for another batch or another model; before beams or several return "
                "sequences on a filled cache call batch_repeat_interleave; give encoder-decoder models an "
                "EncoderDecoderCache."
            )
        if key_states.device != self.device:
            raise CacheMisuseError(
                f"layer {self.layer_idx} lives on {self.device} but was given states on {key_states.device}"
            )

    def _assign(self, index: int, states: torch.Tensor | None) -> None:
        if states is None:
            self.reset()
            return
        self._assigned[index] = states
        if len(self._assigned) == 2:
            key_states, value_states = self._assigned[0], self._assigned[1]
            self.reset()
            self.update(key_states, value_states)

    def _loaded(self, index: int) -> torch.Tensor | None:
        if self._history is None:
            return None
        self._pager.check()
        if self._history.length == 0:
            return self._history.tail.states()[index].clone()
        self._fill_slot(self._history.length)
        return self._complete_slot().states(self._history.length)[index].clone()
