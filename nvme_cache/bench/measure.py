"""Fair comparisons: contenders take turns, round after round, so that a machine that drifts drifts for all of them."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

Figures: TypeAlias = dict[str, Any]  # what becomes JSON; the keys of numbers end in their units
Say: TypeAlias = Callable[[str], None]  # shows one line of progress

_Name = TypeVar("_Name", bound=Hashable)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        wall_s: Seconds that passed.
        cpu_s: CPU seconds of all threads meanwhile, user and system.
        nbytes: Bytes moved.
    """

    wall_s: float
    cpu_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often contenders are compared.

    Attributes:
        budget_s: Seconds after which no further round is begun.
        least: Rounds to run even so.
        most: Rounds that are enough.
    """

    budget_s: float
    least: int = 3
    most: int = 15


def timed(work: Callable[[], int]) -> Sample:
    """Runs `work`, which returns the bytes it moved."""
    cpu, began = time.process_time(), time.perf_counter()
    nbytes = work()
    return Sample(time.perf_counter() - began, time.process_time() - cpu, nbytes)


def interleave(contenders: Mapping[_Name, Callable[[], _Result]], rounds: Rounds) -> dict[_Name, list[_Result]]:
    """Runs every contender once a round, each round beginning with another one.

    Returns:
        The results of each contender, one a round.
    """
    names = list(contenders)
    results: dict[_Name, list[_Result]] = {name: [] for name in names}
    began = time.perf_counter()
    for done in range(rounds.most if names else 0):
        next_end_s = (time.perf_counter() - began) * (done + 1) / max(done, 1)
        if done >= rounds.least and next_end_s > rounds.budget_s:
            break
        first = done % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(contenders[name]())
    return results


def spread(values: Iterable[float]) -> Figures:
    """Median, least and greatest of `values`, in their unit."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": len(found)}


def paired(values: Sequence[float], others: Sequence[float]) -> Figures:
    """The spread of `values` over `others`, round by round: what the machine did to both alike cancels out."""
    return spread(value / other for value, other in zip(values, others, strict=False))


def rates(samples: Sequence[Sample]) -> Figures:
    """Rate in bytes per second and CPU seconds per GB (10^9 bytes) of samples that moved bytes."""
    return {
        "rate_bytes_per_s": spread(sample.nbytes / sample.wall_s for sample in samples),
        "cpu_s_per_gb": spread(sample.cpu_s / sample.nbytes * 1e9 for sample in samples),
    }


def bytes_per_s(samples: Sequence[Sample]) -> list[float]:
    """The rate of each sample."""
    return [sample.nbytes / sample.wall_s for sample in samples]


def median_rates(works: Mapping[_Name, Callable[[], int]], rounds: Rounds) -> dict[_Name, float]:
    """Bytes per second of works that return the bytes they moved, in turns."""
    samples = interleave({name: partial(timed, work) for name, work in works.items()}, rounds)
    return {name: statistics.median(bytes_per_s(found)) for name, found in samples.items()}
