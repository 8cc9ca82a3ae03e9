"""The order in which a model updates its layers: the same in every step, so that the next ones can be fetched ahead."""

from collections.abc import Iterator, Mapping
from itertools import islice

from .layers import NVMeLayer


class Sweep:
    """Learns the order as layers are updated; until it is known, by number. It wraps from the last to the first."""

    def __init__(self) -> None:
        self._successors: dict[int, int] = {}
        self._last: int | None = None

    def fetch_behind(self, current: NVMeLayer, paged: Mapping[int, NVMeLayer], depth: int) -> None:
        """Starts fetching the `depth` layers that follow `current`, which has just been updated, among `paged`."""
        here = current.layer_idx
        if self._last is not None:
            self._successors[self._last] = here
        self._last = here
        for ahead, _ in zip(self.following(current, paged), range(depth), strict=False):
            if not ahead.prefetch_beside(current):
                return

    def following(self, current: NVMeLayer, paged: Mapping[int, NVMeLayer]) -> Iterator[NVMeLayer]:
        """The layers behind `current`, each once, as far as the order is known."""
        here = current.layer_idx
        for ahead in islice(self._following(here, sorted(paged)), len(paged) - 1):
            yield paged[ahead]

    def _following(self, here: int, in_order: list[int]) -> Iterator[int]:
        ahead = here
        while True:
            by_number = in_order[(in_order.index(ahead) + 1) % len(in_order)]
            ahead = self._successors.get(ahead, by_number)
            if ahead == here:
                return
            yield ahead
