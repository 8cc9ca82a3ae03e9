"""How fast a folder's drive is read and written, and how long single reads take."""

import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nvme_cache import io
from nvme_cache.bench.measure import Rounds, Sample, bytes_per_s, interleave, timed
from nvme_cache.bench.plan import KIB, MIB
from nvme_cache.bench.rawfile import touched_buffer
from nvme_cache.bench.site import drop_pages
from nvme_cache.shards import MAX_SECTION_BYTES

SHARD_BYTES = 2 * MAX_SECTION_BYTES  # keys and values
_MOST_BYTES = 256 * MIB
_FREE_SHARE = 0.25
_WRITE_S = 1.0
_REQUEST_BYTES = tuple(64 * KIB << doubling for doubling in range(9))
_SAMPLE_S = 0.04
_ROUNDS = Rounds(budget_s=2, least=1)
_LATENCY_BYTES = (4 * KIB, 512 * KIB)
_LATENCY_S = 0.4
_LEAST_READS = 20


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast the drive is read in requests of one size.

    Attributes:
        request_bytes: Bytes of a read; each thread has one under way.
        bytes_per_s: The median rate.
        least_bytes_per_s: The least rate seen.
        most_bytes_per_s: The greatest rate seen.
    """

    request_bytes: int
    bytes_per_s: float
    least_bytes_per_s: float
    most_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """How long reads anywhere in a file take, one at a time.

    Attributes:
        request_bytes: Bytes of a read.
        reads: How many were made.
        p50_s: Half of them took no longer.
        p95_s: 95 of 100 took no longer.
        p99_s: 99 of 100 took no longer.
    """

    request_bytes: int
    reads: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class DriveFacts:
    """What was measured.

    Attributes:
        threads: Threads that read.
        write_bytes_per_s: Rate at which one thread writes a new file, shard by shard.
        reads: Rates by size, smallest first.
        latencies: Of small and of block-sized reads.
    """

    threads: int
    write_bytes_per_s: float
    reads: Sequence[ReadRate]
    latencies: Sequence[Latency]

    @property
    def best_bytes_per_s(self) -> float:
        """The rate that the best size reaches."""
        return max(read.bytes_per_s for read in self.reads)


def measure_drive(folder: Path, free_bytes: int, threads: int, *, direct: bool) -> DriveFacts:
    """Measures for some three seconds, on slow drives longer, and leaves nothing.

    Args:
        folder: Where a file is made, of the bytes written in a second, at least a shard.
        free_bytes: What may be written there; at most a quarter of it is.
        threads: Threads that read.
        direct: Whether to bypass the page cache.

    Raises:
        OSError: there is too little room, or the drive refuses.
    """
    most_bytes = min(_MOST_BYTES, int(free_bytes * _FREE_SHARE)) // SHARD_BYTES * SHARD_BYTES
    if not most_bytes:
        raise OSError(f"a test needs {SHARD_BYTES / _FREE_SHARE / MIB:g} MiB free")
    path = folder / "probe"  # a name that stores delete, should this process be killed
    descriptor = io.open_file(path, direct=direct, create=True)
    try:
        written = timed(partial(_write, descriptor, most_bytes, direct=direct))
        reader = _Reader(path, descriptor, written.nbytes, direct)
        return DriveFacts(
            threads,
            written.nbytes / written.wall_s,
            _read_rates(reader, threads),
            [_latency(reader, size) for size in _LATENCY_BYTES],
        )
    finally:
        os.close(descriptor)
        path.unlink()


def _write(descriptor: int, most_bytes: int, *, direct: bool) -> int:
    """Writes until it is enough or takes too long. Returns the file's length."""
    view, began, end = touched_buffer(SHARD_BYTES).view, time.perf_counter(), 0
    while end < most_bytes and (end == 0 or time.perf_counter() - began < _WRITE_S):
        io.preallocate(descriptor, end + SHARD_BYTES)
        io.write_all(descriptor, [view], end)
        if not direct:
            os.fdatasync(descriptor)
        end += SHARD_BYTES
    return end


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    descriptor: int
    nbytes: int
    direct: bool

    def make_cold(self) -> None:
        if not self.direct:
            drop_pages(self.path)

    def read(self, view: memoryview, at: int) -> None:
        if os.preadv(self.descriptor, [view], at) != view.nbytes:
            raise OSError("the drive gave fewer bytes than asked for")


def _read_rates(reader: _Reader, threads: int) -> list[ReadRate]:
    part_bytes = reader.nbytes // threads
    views = [touched_buffer(min(_REQUEST_BYTES[-1], part_bytes)).view for _ in range(threads)]

    def read_part(thread: int, size: int, until: float) -> int:
        start, at = thread * part_bytes, 0
        while at + size <= part_bytes and (at == 0 or time.perf_counter() < until):
            reader.read(views[thread][:size], start + at)
            at += size
        return at

    with ThreadPoolExecutor(threads, "nvme-cache-doctor") as pool:

        def sample(size: int) -> Sample:
            reader.make_cold()
            part = partial(read_part, size=size, until=time.perf_counter() + _SAMPLE_S)
            return timed(lambda: sum(pool.map(part, range(threads))))

        sizes = [size for size in _REQUEST_BYTES if size <= part_bytes]
        samples = interleave({size: partial(sample, size) for size in sizes}, _ROUNDS)
    rates = {size: bytes_per_s(found) for size, found in samples.items()}
    return [ReadRate(size, statistics.median(found), min(found), max(found)) for size, found in rates.items()]


def _latency(reader: _Reader, size: int) -> Latency:
    view, took, until = touched_buffer(size).view, list[float](), time.perf_counter() + _LATENCY_S
    while len(took) < _LEAST_READS or time.perf_counter() < until:
        at = random.randrange(reader.nbytes // size) * size
        reader.make_cold()
        began = time.perf_counter()
        reader.read(view, at)
        took.append(time.perf_counter() - began)
    percentiles = statistics.quantiles(took, n=100, method="inclusive")
    return Latency(size, len(took), percentiles[49], percentiles[94], percentiles[98])
