"""Slots: the device buffers in which layers are laid out for attention.

A slot holds one layer at a time as `[keys|values][batch, heads, capacity, head_dim]`; what `update` returns are views
of exactly the tokens there are. `prefetch_depth + 1` slots serve all layers: one under the attention of now, the others
being filled for the layers ahead.
"""

from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from .blocks import LayerSpec, States, StateSpec
from .buffers import HostBuffer
from .io import ALIGNMENT, round_up
from .transfer import Transfer


class Slot:
    """One buffer, laid out for the layer that holds it now.

    Attributes:
        keys: `[batch, heads, capacity, head_dim]` view for keys.
        values: The same for values.
        filled: Tokens, from the first, that are or will be in place once `tasks` are done.
        exposed: Tokens that views handed out may show.
        tasks: What is still filling the slot; each resolves to the event behind its copies.
        tenancy: Changes whenever the slot passes to another layer.
        is_abandoned: Whether the layer it is being filled for no longer wants it.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._nbytes = 0
        self._host: HostBuffer | None = None
        self.tenancy = 0
        self.is_abandoned = False
        self.tasks: list[Future[torch.Event | None]] = []

    @torch.inference_mode(False)  # views born in inference mode could not be written outside it
    def lay_out(self, spec: LayerSpec, batch_size: int, capacity: int) -> None:
        """Passes the slot to a layer with room for `capacity` tokens; contents are undefined.

        Nobody else may hold the slot's storage, and its tasks must be done.
        """
        self.tenancy += 1
        self.is_abandoned = False
        self.tasks = []
        self.filled = self.exposed = 0
        self.capacity = capacity
        keys_nbytes = round_up(spec.keys.nbytes(capacity) * batch_size, ALIGNMENT)
        nbytes = keys_nbytes + spec.values.nbytes(capacity) * batch_size
        if nbytes > self._nbytes:
            self.keys = self.values = torch.empty(0)  # lets go of the old storage before the new one is made
            self._allocate(round_up(nbytes + nbytes // 16, ALIGNMENT))
        self._values_offset = keys_nbytes
        self.keys = self._lay_out(spec.keys, batch_size, 0)
        self.values = self._lay_out(spec.values, batch_size, keys_nbytes)
        self._own_references = self._references()

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
        """Whether someone still holds a tensor over this storage: a model sharing KV across layers, or the user."""
        return self._nbytes > 0 and self._references() > self._own_references

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
        """Waits until nothing is filling the slot any more, whatever became of it."""
        wait(self.tasks)
        for task in self.tasks:
            if not task.cancelled() and task.exception() is None and (event := task.result()) is not None:
                event.synchronize()
        self.tasks = []

    def rows(self, states: torch.Tensor, start: int, num_blocks: int, block_size: int) -> list[memoryview] | None:
        """Where a shard's section goes if the drive can fill the slot directly.

        Args:
            states: `keys` or `values`.
            start: Token at which the first block goes.
            num_blocks: Blocks in the section.
            block_size: Tokens in each.

        Returns:
            One view per block, batch row and head, in the section's byte order; None where the slot is not host memory
            or a row does not begin and end on a page.
        """
        row_nbytes = block_size * states.shape[3] * states.dtype.itemsize
        base = 0 if states is self.keys else self._values_offset
        stride = self.capacity * states.shape[3] * states.dtype.itemsize
        first = base + start * states.shape[3] * states.dtype.itemsize
        if self._host is None or row_nbytes % ALIGNMENT or stride % ALIGNMENT or first % ALIGNMENT:
            return None
        view = self._host.view
        heads = range(first, first + states.shape[0] * states.shape[1] * stride, stride)
        return [
            view[at + block * row_nbytes : at + (block + 1) * row_nbytes] for block in range(num_blocks) for at in heads
        ]

    def _allocate(self, nbytes: int) -> None:
        if self._transfer.device.type == "cpu":
            self._host = HostBuffer(nbytes)
            self._buffer = self._host.bytes
        else:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._transfer.device)
        self._storage = self._buffer.untyped_storage()
        self._nbytes = nbytes

    def _lay_out(self, spec: StateSpec, batch_size: int, offset: int) -> torch.Tensor:
        size = spec.nbytes(self.capacity) * batch_size
        states = self._buffer[offset : offset + size].view(spec.dtype)
        return states.view(batch_size, spec.num_heads, self.capacity, spec.head_dim)

    def _references(self) -> int:
        # The one count that includes every view, saved for backward or held in C++, not only Python objects.
        return int(torch._C._storage_Use_Count(self._storage._cdata))


@dataclass(frozen=True, slots=True)
class Lease:
    """A layer's hold on a slot, valid until the slot passes to another layer."""

    slot: Slot
    tenancy: int

    @property
    def is_valid(self) -> bool:
        """Whether the slot still holds this layer."""
        return self.slot.tenancy == self.tenancy


class SlotPool:
    """The slots of one device.

    Args:
        transfer: The device's transfer.
        count: How many slots to make; more exist only while someone outside holds the tensors of one.
    """

    def __init__(self, transfer: Transfer, count: int) -> None:
        self._transfer = transfer
        self._count = count
        self._slots: list[Slot] = []

    def acquire(self, keep: Slot | None, *, steal: bool) -> Slot | None:
        """A slot to lay out: one whose layer is done with it, else a new one.

        Args:
            keep: A slot not to take: the one whose views are about to be used.
            steal: Whether to take one that is being filled ahead when all are.

        Returns:
            The slot, or None if all are being filled and none may be stolen.
        """
        available = [slot for slot in self._slots if slot is not keep and not slot.is_shared()]
        idle = [slot for slot in available if slot.is_idle]
        if idle:
            return idle[0]
        if len(available) + (keep is not None) < self._count:
            self._slots.append(Slot(self._transfer))
            return self._slots[-1]
        if not steal:
            return None
        available[-1].settle()
        return available[-1]

    def clear(self) -> None:
        """Waits for what is filling slots and lets go of all of them."""
        for slot in self._slots:
            slot.settle()
        self._slots.clear()
