"""What the control groups of this process, versions 1 and 2, leave it of the machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")
_MEMORY_FILES = (  # limit, use, and the part of the use that the kernel gives back at once
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of memory and what is taken of it.

    Attributes:
        limit_bytes: Most memory the group may have.
        used_bytes: What it has, files that were read and may be dropped aside.
    """

    limit_bytes: int
    used_bytes: int


def kernel_text(path: Path) -> str:
    """What the kernel says in a file; "unknown" where it has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def memory_limit(root: Path = _ROOT) -> MemoryLimit | None:
    """The limit that leaves least; None without any. `root` is where `/proc` and `/sys` are."""
    limits = []
    for group in _groups("memory", root):
        for limit, used, droppable in _MEMORY_FILES:
            if (most := kernel_text(group / limit)).isdigit():
                held = kernel_text(group / used)
                taken = int(held) - _statistic(group / "memory.stat", droppable) if held.isdigit() else 0
                limits.append(MemoryLimit(int(most), max(taken, 0)))
    return min(limits, key=lambda found: found.limit_bytes - found.used_bytes, default=None)


def available_bytes() -> int:
    """Memory that the machine, or the container, can give now without swapping."""
    available, limit = psutil.virtual_memory().available, memory_limit()
    return int(available if limit is None else min(available, max(0, limit.limit_bytes - limit.used_bytes)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores' worth of time the tightest quota allows; None without any. `root` is where `/proc` and `/sys` are."""
    quotas = []
    for group in _groups("cpu", root):
        version_2 = kernel_text(group / "cpu.max").split()
        version_1 = [kernel_text(group / "cpu.cfs_quota_us"), kernel_text(group / "cpu.cfs_period_us")]
        for numbers in (version_2, version_1):
            if all(number.isdigit() for number in numbers) and len(numbers) == 2:
                quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the groups this process is in, each with those above it; a container may see the top alone."""
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / name.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _statistic(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in kernel_text(path).splitlines() if line.split()[0] == name), 0)
