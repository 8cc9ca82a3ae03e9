"""What a drive can do, found out by a short test of the folder: its rate, and how many threads it takes to reach it."""

import logging
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from . import io
from .buffers import HostBuffer
from .transfer import transfer_for

logger = logging.getLogger(__name__)

TEST_BYTES = 16 << 20
_TEST_S = 0.05
_FEW_THREADS, _MANY_THREADS = 2, 4
_WORTH_MORE_THREADS = 1.2
_COVER_S = 0.010  # a thread waits up to 5 ms (`sys.getswitchinterval`) for the interpreter, before a read and after it
_LEAST_DEPTH, _MOST_DEPTH = 2, 4


@dataclass(frozen=True, slots=True)
class Drive:
    """How to read a drive.

    Attributes:
        read_bytes_per_s: The rate it was seen to read at; where it was not tested, that of a common NVMe drive.
        io_threads: Threads that reach this rate with one long read each.
    """

    read_bytes_per_s: float = 3e9
    io_threads: int = _FEW_THREADS

    def prefetch_depth(self, layer_bytes: int, *, is_exact: bool = True) -> int:
        """How many layers of `layer_bytes` to fetch ahead: so many that the drive does not run dry between two.

        Of quantized layers it is one more, which is decoded while the others are read.
        """
        needed = round(self.read_bytes_per_s * _COVER_S / max(layer_bytes, 1))
        return min(max(needed, _LEAST_DEPTH + (not is_exact)), _MOST_DEPTH)


_tested: dict[int, Drive] = {}  # by device number


def drive_of(folder: Path) -> Drive:
    """The drive under `folder`, which takes `O_DIRECT`; tested the first time it is asked for in this process.

    The test writes `TEST_BYTES`, reads them for about a twentieth of a second and leaves nothing.
    """
    device = folder.stat().st_dev
    if device not in _tested:
        _tested[device] = _test(folder)
        logger.info("drive under %s: %s", folder, _tested[device])
    return _tested[device]


def _test(folder: Path) -> Drive:
    buffer = HostBuffer(transfer_for(torch.device("cpu")).host_memory(TEST_BYTES))
    buffer.view[:] = os.urandom(io.ALIGNMENT) * (TEST_BYTES // io.ALIGNMENT)
    path = folder / "probe"
    try:
        descriptor = io.open_file(path, direct=True, create=True)
        try:
            path.unlink()  # nothing stays, whatever happens
            io.preallocate(descriptor, TEST_BYTES)
            io.write_all(descriptor, [buffer.view], 0)
            return _fastest(descriptor, buffer.view)
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.info("cannot test the drive under %s: %s", folder, error)
        return Drive()


def _fastest(descriptor: int, view: memoryview) -> Drive:
    with ThreadPoolExecutor(_MANY_THREADS, "nvme-cache-test") as pool:

        def rate(threads: int) -> float:
            size = view.nbytes // threads
            parts = [(view[at : at + size], at) for at in range(0, view.nbytes, size)]
            began = time.perf_counter()
            list(pool.map(lambda part: io.read_all(descriptor, [part[0]], part[1]), parts))
            return view.nbytes / (time.perf_counter() - began)

        rates: list[tuple[float, float]] = []
        began = time.perf_counter()
        while not rates or time.perf_counter() - began < _TEST_S:
            rates.append((rate(_FEW_THREADS), rate(_MANY_THREADS)))
    few, many = map(statistics.median, zip(*rates, strict=True))
    return Drive(many, _MANY_THREADS) if many > _WORTH_MORE_THREADS * few else Drive(few, _FEW_THREADS)
