"""Slots: the device buffers in which layers are laid out for attention.

A slot holds one layer at a time as `[keys|values][batch, heads, capacity, head_dim]`; what `update` returns are views
of exactly the tokens there are. `prefetch_depth + 1` slots serve all layers: one under the attention of now, the others
being filled for the layers ahead.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .buffers import HostBuffer
from .io import ALIGNMENT, round_up
from .states import LayerSpec, States, StateSpec
from .transfer import Transfer

Check: TypeAlias = Callable[[], None]

_WINDOW = 512  # updates: slots that were not needed for one or two of these are given up


class Slot:
    """One buffer, laid out for the layer that holds it now.

    Attributes:
        keys: `[batch, heads, capacity, head_dim]` view for keys.
        values: The same for values.
        filled: Tokens, from the first, that are or will be in place once `tasks` are done.
        exposed: Tokens that views handed out may show.
        tasks: What is still filling the slot.
        tenancy: Changes whenever the slot passes to another layer.
        is_abandoned: Whether the layer it is being filled for no longer wants it.
        stream: The stream its memory was made on, and goes back to: the only one to use it on.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._nbytes = 0
        self._host: HostBuffer | None = None
        self._buffer = self.keys = self.values = torch.empty(0)
        self._storage = self._buffer.untyped_storage()
        self._own_references = sys.maxsize
        self._layout: tuple[LayerSpec | None, int, int] = (None, 0, 0)
        self.tenancy = self.filled = self.exposed = self.capacity = 0
        self.is_abandoned = False
        self.stream = transfer.stream()
        self.tasks: list[Future[Any]] = []

    def lay_out(self, spec: LayerSpec, batch_size: int, capacity: int) -> None:
        """Passes the slot to a layer with room for `capacity` tokens; contents are undefined.

        Nobody else may hold the slot's storage, and its tasks must be done.
        """
        self.tenancy += 1
        self.is_abandoned = False
        self.tasks = []
        self.filled = self.exposed = 0
        if (spec, batch_size, capacity, self._transfer.stream()) != (*self._layout, self.stream):
            self._lay_out(spec, batch_size, capacity)

    def serves(self, length: int) -> bool:
        """Whether `length` tokens fit and the model still computes on the stream the slot was laid out for."""
        return length <= self.capacity and self.stream == self._transfer.stream()

    def append(self, states: States) -> None:
        """Writes tokens behind those in place, on the device's current stream."""
        end = self.filled + states[0].shape[2]
        for target, new in zip((self.keys, self.values), states, strict=True):
            target[:, :, self.filled : end].copy_(new)
        self.filled = end

    def states(self, length: int) -> States:
        """Views of the first `length` tokens, `[batch, heads, length, head_dim]` each."""
        self.exposed = length
        return self.keys[:, :, :length], self.values[:, :, :length]

    def is_shared(self) -> bool:
        """Whether someone still holds a tensor over this storage: a model sharing KV across layers, or the user.

        While tasks fill the slot only they hold any: views are handed out when it is filled.
        """
        return self._nbytes > 0 and not self.tasks and self._references() > self._own_references

    @property
    def is_idle(self) -> bool:
        """Whether nothing is filling the slot that anyone waits for."""
        return not self.tasks or (self.is_abandoned and all(task.done() for task in self.tasks))

    def abandon(self) -> None:
        """Says that what the slot holds, or will hold, is no longer wanted."""
        self.tenancy += 1
        self.is_abandoned = True
        for task in self.tasks:
            task.cancel()

    def settle(self) -> None:
        """Waits until nothing is filling the slot any more, on the device either, whatever became of it."""
        if self.tasks:
            wait(self.tasks)
            self._transfer.record().synchronize()
        self.tasks = []

    def rows(self, index: int, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> list[memoryview] | None:
        """Where a shard's section goes if the drive can fill the slot directly.

        Args:
            index: 0 for keys, 1 for values.
            dtype: What the section holds.
            start: Token at which the section goes.
            shape: Of the section, `[num_pieces, batch, heads, piece_length, head_dim]`.

        Returns:
            One view per piece, batch row and head, in the section's byte order; None where the slot is not host
            memory, has another dtype, or a row does not begin and end on a page.
        """
        num_pieces, batch_size, num_heads, piece_length, head_dim = shape
        token_nbytes = head_dim * dtype.itemsize
        row_nbytes, stride = piece_length * token_nbytes, self.capacity * token_nbytes
        first = (0, self._values_offset)[index] + start * token_nbytes
        aligned = row_nbytes and not (row_nbytes % ALIGNMENT or stride % ALIGNMENT or first % ALIGNMENT)
        if self._host is None or dtype != (self.keys, self.values)[index].dtype or not aligned:
            return None
        view = self._host.view
        heads = range(first, first + batch_size * num_heads * stride, stride)
        return [
            view[at + piece * row_nbytes : at + (piece + 1) * row_nbytes] for piece in range(num_pieces) for at in heads
        ]

    @torch.inference_mode(False)  # views born in inference mode could not be written outside it
    def _lay_out(self, spec: LayerSpec, batch_size: int, capacity: int) -> None:
        self._layout = None, 0, 0
        self.capacity = capacity
        keys_nbytes = round_up(spec.keys.nbytes(capacity) * batch_size, ALIGNMENT)
        nbytes = keys_nbytes + spec.values.nbytes(capacity) * batch_size
        self._own_references = sys.maxsize
        if nbytes > self._nbytes or self.stream != self._transfer.stream():
            self._allocate(round_up(nbytes + nbytes // 16, ALIGNMENT))
        self._values_offset = keys_nbytes
        self.keys = self._view(spec.keys, batch_size, 0)
        self.values = self._view(spec.values, batch_size, keys_nbytes)
        self._own_references = self._references()
        self._layout = spec, batch_size, capacity

    def _allocate(self, nbytes: int) -> None:
        # Lets go of the old memory before the new is made.
        self._nbytes, self._host = 0, None
        self._buffer = self.keys = self.values = torch.empty(0)
        self._storage = self._buffer.untyped_storage()
        self._buffer = self._transfer.device_memory(nbytes)
        self._host = HostBuffer(self._buffer) if self._transfer.is_host else None
        self.stream = self._transfer.stream()
        self._storage = self._buffer.untyped_storage()
        self._nbytes = nbytes

    def _view(self, spec: StateSpec, batch_size: int, offset: int) -> torch.Tensor:
        size = spec.nbytes(self.capacity) * batch_size
        states = self._buffer[offset : offset + size].view(spec.dtype)
        return states.view(batch_size, spec.num_heads, self.capacity, spec.head_dim)

    def _references(self) -> int:
        # The one count that includes every view, saved for backward or held in C++, not only Python objects.
        return int(torch._C._storage_Use_Count(self._storage._cdata))


class SlotPool:
    """The slots of one device.

    Args:
        transfer: The device's transfer.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._slots: list[Slot] = []
        self._calls = self._count = self._needed = self._needed_before = 0

    def acquire(self, keep: Slot | None, count: int, *, steal: bool) -> Slot | None:
        """A slot to lay out: one whose layer is done with it, else a new one.

        Args:
            keep: A slot not to take: the one whose views are about to be used.
            count: How many slots there should be; more exist only while someone outside holds the tensors of one.
            steal: Whether to take one that is being filled ahead when all are.

        Returns:
            The slot, or None if all are being filled and none may be stolen.
        """
        self._count = count
        available = [slot for slot in self._slots if slot is not keep and not slot.is_shared()]
        idle = [slot for slot in available if slot.is_idle]
        if idle:
            slot = idle[0]
        elif len(available) + (keep is not None) < count:
            slot = Slot(self._transfer)
        elif steal:
            slot = available[-1]
        else:
            return None
        self._slots = [other for other in self._slots if other is not slot] + [slot]  # the longest held come first
        slot.settle()  # copies that an earlier layer no longer waits for may be under way
        return slot

    def trim(self, keep: Slot) -> None:
        """Gives up slots that have not been needed for a while.

        Args:
            keep: A slot in use.
        """
        needed = self._count + sum(slot.is_shared() for slot in self._slots)
        if self._calls % _WINDOW == 0:
            self._needed_before, self._needed = self._needed, 0
        self._calls += 1
        self._needed = max(self._needed, needed)
        surplus = len(self._slots) - max(self._needed, self._needed_before)
        if surplus > 0:
            spare = [slot for slot in self._slots if slot is not keep and slot.is_idle and not slot.is_shared()]
            for slot in spare[:surplus]:
                slot.abandon()
                slot.settle()
                self._slots.remove(slot)

    def wait(self) -> None:
        """Waits until nothing is filling any slot."""
        for slot in self._slots:
            wait(slot.tasks)


@dataclass(frozen=True, slots=True)
class Lease:
    """A layer's hold on a slot, valid until the slot passes to another layer.

    Attributes:
        slot: The slot.
        tenancy: What the slot's was when it passed to this layer.
        pool: Where the slot is from.
        checks: To be made by whoever waits for the slot to be filled, before anyone uses what is in it.
    """

    slot: Slot
    tenancy: int
    pool: SlotPool
    checks: list[Check]

    @property
    def is_valid(self) -> bool:
        """Whether the slot still holds this layer."""
        return self.slot.tenancy == self.tenancy

    @property
    def is_filled(self) -> bool:
        """Whether nothing is filling the slot any more."""
        return all(task.done() for task in self.slot.tasks)
