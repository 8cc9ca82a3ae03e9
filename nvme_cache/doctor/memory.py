"""The memory a cache may take, and whether its buffers get huge pages."""

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from nvme_cache.cgroup import kernel_text, memory_limit
from nvme_cache.transfer import transfer_for

from .folder import soft_limit

_TRIED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory and the limits around it.

    Attributes:
        total_bytes: What the machine has.
        available_bytes: What it can give now without swapping.
        group_limit_bytes: Most the control group of this process may have; None if it may have all.
        group_used_bytes: What the group has of that; None likewise.
        locked_limit_bytes: Most this process may lock; None without limit.
        open_files_limit: Files it may have open; None without limit.
        huge_page_setting: What the kernel is set to: "always", "madvise" or "never"; "unknown" where it has none.
        buffer_bytes: Size of a buffer made as the cache makes them.
        buffer_huge_page_bytes: What came of it in huge pages; None where the kernel does not tell.
    """

    total_bytes: int
    available_bytes: int
    group_limit_bytes: int | None
    group_used_bytes: int | None
    locked_limit_bytes: int | None
    open_files_limit: int | None
    huge_page_setting: str
    buffer_bytes: int
    buffer_huge_page_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """What this process can still get, in bytes."""
        if self.group_limit_bytes is None or self.group_used_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(self.group_limit_bytes - self.group_used_bytes, 0))


def memory_facts() -> MemoryFacts:
    """What this machine gives now."""
    machine, group = psutil.virtual_memory(), memory_limit()
    if group is not None and group.limit_bytes >= machine.total:
        group = None
    before = _huge_page_bytes()
    buffer = transfer_for(torch.device("cpu")).host_memory(_TRIED_BYTES).fill_(1)
    after = _huge_page_bytes()
    return MemoryFacts(
        total_bytes=machine.total,
        available_bytes=machine.available,
        group_limit_bytes=None if group is None else group.limit_bytes,
        group_used_bytes=None if group is None else group.used_bytes,
        locked_limit_bytes=soft_limit(resource.RLIMIT_MEMLOCK),
        open_files_limit=soft_limit(resource.RLIMIT_NOFILE),
        huge_page_setting=_chosen(kernel_text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        buffer_bytes=buffer.numel(),
        buffer_huge_page_bytes=None if before is None or after is None else max(after - before, 0),
    )


def _huge_page_bytes() -> int | None:
    """Huge pages of this process's own memory, in bytes."""
    for line in kernel_text(Path("/proc/self/smaps_rollup")).splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return None


def _chosen(setting: str) -> str:
    """The word in brackets: the kernel shows "always [madvise] never"."""
    return next((word.strip("[]") for word in setting.split() if word.startswith("[")), "unknown")
