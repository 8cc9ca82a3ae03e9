"""The feed: brings segments in front of attention, in the order of the sweep, a few ahead of the one being read."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeAlias

import torch

from .pager import Pager
from .segments import Segment
from .slots import Lease
from .states import States

Visit: TypeAlias = Callable[[Segment, States], None]
Guard: TypeAlias = Callable[[torch.device], AbstractContextManager[None]]


class Feed:
    """The segments under way to a cache's layers, oldest first; each in a slot of its own.

    Args:
        pager: What fetches them.
    """

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._ahead: deque[tuple[Segment, Lease]] = deque()
        self._largest = 1  # bytes

    def read(
        self, segments: list[Segment], following: Callable[[], Iterator[Segment]], guard: Guard, visit: Visit
    ) -> None:
        """Has `visit` read segments one after the other, while those behind them are fetched.

        Args:
            segments: What to read.
            following: What will be read next, as far as can be told.
            guard: What fetching and waiting go on in.
            visit: Reads a segment; it must keep nothing of what it is given.

        Raises:
            NVMeCacheError: a segment is damaged or unreadable, or something went wrong in the background.
        """
        for index, segment in enumerate(segments):
            if (states := segment.in_place) is not None:
                self._pager.wait_for_sealed(segment.device)
                visit(segment, states)
                continue
            with guard(segment.device):
                lease = self._filled(segment, chain(segments[index + 1 :], following()))
            visit(segment, lease.slot.states(segment.length))

    def abandon(self) -> None:
        """Gives up what is under way."""
        self._give_up_from(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Feed":
        return Feed(memo[id(self._pager)])

    def _filled(self, segment: Segment, ahead: Iterator[Segment]) -> Lease:
        self._pager.check()
        while True:
            lease = self._taken(segment) or self._fetch(segment, keep=None, steal=True)
            assert lease is not None
            try:
                self._look_ahead(ahead, self._depth(segment), keep=lease)
                if self._pager.wait(lease, segment.device):
                    return lease
            except BaseException:
                if lease.is_valid:
                    lease.slot.abandon()  # nobody else knows of it, and it would count as being filled for ever
                raise

    def _taken(self, segment: Segment) -> Lease | None:
        """The lease of a segment that was fetched ahead, if it is the next one, as it should be."""
        if self._ahead and segment.is_laid_out_as(self._ahead[0][0]):
            lease = self._ahead.popleft()[1]
            return lease if lease.is_valid else None
        self.abandon()  # another order than was foreseen
        return None

    def _look_ahead(self, segments: Iterable[Segment], depth: int, *, keep: Lease) -> None:
        index = 0
        for segment in segments:
            if index == depth:
                return
            if segment.in_place is not None:
                continue
            if index < len(self._ahead):
                held, lease = self._ahead[index]
                if segment.is_laid_out_as(held) and lease.is_valid:
                    index += 1
                    continue
                self._give_up_from(index)
            if (fetched := self._fetch(segment, keep=keep, steal=False)) is None:
                return
            self._ahead.append((segment, fetched))
            index += 1

    def _fetch(self, segment: Segment, *, keep: Lease | None, steal: bool) -> Lease | None:
        return self._pager.fetch(
            segment.device,
            segment.spec,
            segment.batch_size,
            segment.stored_runs,
            capacity=segment.length,
            keep=keep,
            steal=steal,
            ahead=self._depth(segment),
            in_parts=keep is None or not keep.is_filled,  # attention waits for the drive
        )

    def _depth(self, segment: Segment) -> int:
        self._largest = max(self._largest, segment.laid_out_nbytes)  # slots grow to it, whatever they hold next
        return self._pager.segments_ahead(segment.nbytes, self._largest)

    def _give_up_from(self, index: int) -> None:
        while len(self._ahead) > index:
            lease = self._ahead.pop()[1]
            if lease.is_valid:
                lease.slot.abandon()
