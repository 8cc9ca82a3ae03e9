"""The plain way to read and write: each thread moves its part of a file with one call a request, nothing else.

It reads as fast as the same loop in C, so it stands for what the drive gives.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from nvme_cache import io
from nvme_cache.buffers import HostBuffer
from nvme_cache.transfer import transfer_for

from .measure import Sample, timed
from .site import Site, drop_pages

_FILL_BYTES = 16 << 20
_HUGE_PAGE = 2 << 20


def touched_buffer(nbytes: int) -> HostBuffer:
    """`nbytes` bytes of host memory, in huge pages where there are any, faulted in and full of noise."""
    memory = transfer_for(torch.device("cpu")).host_memory(max(nbytes, _HUGE_PAGE))
    noise = torch.randint(0, 256, (min(memory.numel(), 1 << 20),), dtype=torch.uint8)
    for part in memory.split(noise.numel()):
        part.copy_(noise[: part.numel()])
    return HostBuffer(memory[:nbytes])


class RawFile:
    """A file of noise to read in parts, one a thread.

    Args:
        site: Where to make it.
        nbytes: Its size in bytes.
    """

    def __init__(self, site: Site, nbytes: int) -> None:
        self.path = site.folder / "raw"
        self.nbytes = nbytes
        self.threads = site.threads
        self._direct = site.direct
        write_plainly(self.path, touched_buffer(min(nbytes, _FILL_BYTES)).view, nbytes, direct=site.direct)
        self._descriptor = io.open_file(self.path, direct=site.direct)
        self._pool = ThreadPoolExecutor(site.threads, "bench-read")

    def reader(self, request_bytes: int, nbytes: int, memory_bytes: int = 0) -> Callable[[], Sample]:
        """What reads `nbytes` bytes in requests of `request_bytes`, beginning anew where the file ends.

        Requests take turns with `memory_bytes` of buffers, of which there is at least one a thread: what lands in the
        same few again and again stays in the processor's cache and is read faster.
        """
        part_bytes = self.nbytes // self.threads // io.ALIGNMENT * io.ALIGNMENT
        request_bytes = min(request_bytes, part_bytes)
        count = max(1, nbytes // self.threads // request_bytes)
        turns = max(1, memory_bytes // self.threads // request_bytes)
        buffers = [[touched_buffer(request_bytes) for _ in range(turns)] for _ in range(self.threads)]

        def read_part(thread: int) -> int:
            for number in range(count):
                at = number * request_bytes % (part_bytes // request_bytes * request_bytes)
                view = buffers[thread][number % turns].view
                if os.preadv(self._descriptor, [view], thread * part_bytes + at) != request_bytes:
                    raise EOFError(f"{self.path} gave fewer bytes than asked for")
            return count * request_bytes

        def read() -> Sample:
            if not self._direct:
                drop_pages(self.path)
            return timed(lambda: sum(self._pool.map(read_part, range(self.threads))))

        return read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


def write_plainly(path: Path, view: memoryview, nbytes: int, *, direct: bool) -> int:
    """Makes a file of `nbytes` bytes from `view`, again and again, in requests of its size. Returns `nbytes`."""
    descriptor = io.open_file(path, direct=direct, create=True)
    try:
        io.preallocate(descriptor, nbytes)
        for at in range(0, nbytes, view.nbytes):
            io.write_all(descriptor, [view[: nbytes - at]], at)
        if not direct:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return nbytes
