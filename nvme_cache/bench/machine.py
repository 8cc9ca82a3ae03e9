"""Which machine the figures are of."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

import psutil
import torch

from nvme_cache import io, store

from .measure import Figures


def describe(folder: Path) -> Figures:
    """CPU, memory, kernel, drive and versions; `folder` is where the shards go."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "folder": str(folder),
        "file_system": store.file_system_of(folder),
        "device": _device(folder),
        "free_bytes": shutil.disk_usage(folder).free,
        "direct_io": io.supports_direct(folder),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("nvme-cache", "torch", "transformers", "safetensors", "ollm")},
    }


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _device(folder: Path) -> Figures:
    """The block device under `folder`, as the kernel names it."""
    parents = {str(parent) for parent in [folder.resolve(), *folder.resolve().parents]}
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint in parents]
    if not mounts:
        return {"name": "unknown"}
    name = max(mounts, key=lambda mount: len(mount.mountpoint)).device
    queue = Path("/sys/class/block", Path(name).name).resolve()
    disk = queue if (queue / "queue").exists() else queue.parent  # a partition lies in its disk's folder
    return {
        "name": name,
        "model": _read(disk / "device/model"),
        "rotational": _read(disk / "queue/rotational"),
        "read_ahead_kb": _read(disk / "queue/read_ahead_kb"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
