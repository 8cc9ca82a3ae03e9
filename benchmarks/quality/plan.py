"""How much is measured."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, in tokens unless said otherwise.

    Attributes:
        caches: Names of those that take part; None for all.
        window: Length of a window of text.
        windows: How many windows.
        warm_up: Predictions from less context than this are not scored: there, nearly everything is exact.
        prompt: Length of the prompt before tokens are fed one at a time.
        steps: How many are fed so.
        stepwise: Names of the caches that take part there; None for all.
        documents: Length of each document in which facts are planted.
        facts: Facts in each, at depths evenly spaced.
        answer: Longest answer.
        needles: Names of the caches that take part there; None for all.
        probe: How much of one layer's keys and values is stored to see what comes back.
    """

    caches: tuple[str, ...] | None
    window: int
    windows: int
    warm_up: int
    prompt: int
    steps: int
    stepwise: tuple[str, ...] | None
    documents: tuple[int, ...]
    facts: int
    answer: int
    needles: tuple[str, ...] | None
    probe: int

    def with_window(self, window: int) -> "Plan":
        """The same with windows of so many tokens, and nothing longer than they."""
        half = window // 2
        prompt, steps, probe = min(self.prompt, half), min(self.steps, half), min(self.probe, window)
        return replace(self, window=window, prompt=prompt, steps=steps, probe=probe)

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


_STEPWISE = ("nvme-cache int4", "nvme-cache int2", "quanto int4", "quanto int2")

FULL = Plan(
    caches=None,
    window=4096,
    windows=2,
    warm_up=512,
    prompt=1024,
    steps=256,
    stepwise=_STEPWISE,
    documents=(1800, 1800, 3600),
    facts=5,
    answer=24,
    needles=(
        "nvme-cache int8",
        "nvme-cache float8",
        "nvme-cache int8 keys, int4 values",
        *_STEPWISE,
        "quanto int4, keys by channel",
        "quanto int2, keys by channel",
    ),
    probe=2048,
)
QUICK = Plan(
    caches=(
        "exact",
        "nvme-cache int8",
        "nvme-cache float8",
        "nvme-cache int8 keys, int4 values",
        *_STEPWISE,
    ),
    window=768,
    windows=1,
    warm_up=512,
    prompt=272,
    steps=8,
    stepwise=("nvme-cache int4", "quanto int4"),
    documents=(384,),
    facts=1,
    answer=16,
    needles=("nvme-cache int4", "quanto int4"),
    probe=640,
)
