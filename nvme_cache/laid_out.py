"""LaidOutMixin: how a layer's history is laid out whole in a slot."""

import torch

from .history import History
from .io import round_up
from .pager import Pager
from .slots import Lease, Slot
from .states import LayerSpec


class LaidOutMixin:
    """The part of a layer that has a slot filled with its history, ahead of time if asked to."""

    _pager: Pager
    _spec: LayerSpec
    _history: History | None
    _lease: Lease | None
    _update_length: int
    batch_size: int
    device: torch.device
    is_streamed: bool

    def prefetch_beside(self, current: "LaidOutMixin") -> bool:
        """Starts filling a slot for the next update while `current`'s stays in use.

        Returns:
            False if no slot is free for it.
        """
        length = 0 if self._history is None else self._history.length
        if length == 0 or self.is_streamed or (self._lease is not None and self._lease.is_valid):
            return True
        self._lease = self._fetch(length + self._update_length, keep=current._lease, steal=False)
        return self._lease is not None

    def _fill_slot(self, length: int) -> None:
        """Sees to it that a slot with room for `length` tokens holds the sealed ones."""
        assert self._history is not None
        if self._lease is not None and self._lease.is_valid:
            slot = self._lease.slot
            # Appending after a crop would overwrite tokens that a tensor returned earlier still shows.
            overwrites = self._history.length < slot.exposed and slot.is_shared()
            # An interrupt may have come between sealing tokens and putting them into the slot.
            lacks = slot.filled < self._history.sealed_length
            if overwrites or lacks or not slot.serves(length):
                slot.abandon()
        while True:
            if self._lease is None or not self._lease.is_valid:
                self._lease = self._fetch(length, keep=None, steal=True)
            assert self._lease is not None
            if self._pager.wait(self._lease, self.device):
                return

    @torch.no_grad()
    def _complete_slot(self) -> Slot:
        """The layer's filled slot, with the tail in place too."""
        assert self._history is not None and self._lease is not None
        slot = self._lease.slot
        slot.append(self._history.tail.states(slot.filled - self._history.sealed_length))
        return slot

    def _fetch(self, length: int, *, keep: Lease | None, steal: bool) -> Lease | None:
        # Whole blocks of capacity let the drive fill a slot directly; one to spare lets decoding go on in it.
        capacity = round_up(length, self._pager.block_size) + self._pager.block_size
        runs = () if self._history is None else self._history.runs
        return self._pager.fetch(
            self.device, self._spec, self.batch_size, runs, capacity=capacity, keep=keep, steal=steal
        )

    def _abandon_slot(self) -> None:
        if self._lease is not None and self._lease.is_valid:
            self._lease.slot.abandon()
        self._lease = None
