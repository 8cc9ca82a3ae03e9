"""Which machine the figures are of."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import psutil
import torch

from nvme_cache import io, store
from nvme_cache.cgroup import kernel_text

from .measure import Figures


def describe(folder: Path) -> Figures:
    """CPU, memory, kernel, drive and versions; `folder` is where the shards go."""
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "huge_pages": kernel_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "folder": str(folder),
        "file_system": store.file_system_of(folder),
        "device": device_of(folder),
        "free_bytes": shutil.disk_usage(folder).free,
        "direct_io": io.supports_direct(folder),
        "python": platform.python_version(),
        **{name: version(name) for name in ("nvme-cache", "torch", "transformers", "safetensors", "ollm")},
    }


def cpu_name() -> str:
    """The processor's name for itself, else its architecture."""
    for line in kernel_text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def device_of(folder: Path) -> Figures:
    """The block device under `folder`, as the kernel names it, and what it says of itself."""
    _, name = store.mount_of(folder)
    # Mapped devices have names of their own beside the kernel's.
    queue = Path("/sys/class/block", Path(name).resolve().name).resolve()
    disk = queue if (queue / "queue").exists() else queue.parent  # a partition lies in its disk's folder
    return {
        "name": name,
        "model": kernel_text(disk / "device/model"),
        "rotational": kernel_text(disk / "queue/rotational"),
        "read_ahead_kb": kernel_text(disk / "queue/read_ahead_kb"),
    }


def version(name: str) -> str | None:
    """The installed version of a package; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
