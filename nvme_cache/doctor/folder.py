"""The folder shards would go to: where its bytes end up, and how many it takes."""

import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvme_cache import io
from nvme_cache.bench.machine import device_of
from nvme_cache.store import RAM_FILE_SYSTEMS, file_system_of

_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"),
    *("fuse.cephfs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"),
}


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder this process may write to.

    Attributes:
        path: As asked for, the home folder written "~".
        file_system: Such as "ext4".
        kind: Where the bytes end up.
        device: The kernel's name of the block device, such as "nvme0n1"; None where there is none.
        device_model: What the device calls itself; None if it does not.
        is_rotational: Whether the device says that it turns; virtual ones say so whatever they are.
        takes_direct: Whether `O_DIRECT` is taken and keeps what is written out of the page cache.
        total_bytes: Size of the file system.
        free_bytes: What this user may still write.
        file_limit_bytes: Longest file this process may write; None without limit.
        removed_orphans: Names of the folders that were found there, left by processes that died, and removed.
    """

    path: str
    file_system: str
    kind: Literal["local", "network", "RAM"]
    device: str | None
    device_model: str | None
    is_rotational: bool
    takes_direct: bool
    total_bytes: int
    free_bytes: int
    file_limit_bytes: int | None
    removed_orphans: Sequence[str]


def folder_facts(asked: Path, own: Path, removed: Sequence[Path]) -> FolderFacts:
    """Facts about the folder `asked` for, found out in `own`, a private folder inside it.

    Raises:
        OSError: the folder takes no files.
    """
    file_system, device, usage = file_system_of(own), device_of(own), shutil.disk_usage(own)
    name = str(device["name"])
    return FolderFacts(
        path=_without_home(asked),
        file_system=file_system,
        kind=_kind(file_system),
        # What else is mounted, shares say, has names that tell of hosts and users.
        device=Path(name).resolve().name if name.startswith("/dev/") else None,
        device_model=None if device["model"] == "unknown" else device["model"],
        is_rotational=device["rotational"] == "1",
        takes_direct=io.supports_direct(own),
        total_bytes=usage.total,
        free_bytes=usage.free,
        file_limit_bytes=soft_limit(resource.RLIMIT_FSIZE),
        removed_orphans=[path.name for path in removed],
    )


def soft_limit(kind: int) -> int | None:
    """The soft limit of a resource for this process; None without limit."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _kind(file_system: str) -> Literal["local", "network", "RAM"]:
    if file_system in RAM_FILE_SYSTEMS:
        return "RAM"
    return "network" if file_system in _NETWORK_FILE_SYSTEMS else "local"


def _without_home(path: Path) -> str:
    """`path` as given, but for the name of the user in it: reports are pasted where anybody reads them."""
    home = Path.home()
    return str("~" / path.relative_to(home)) if path.is_relative_to(home) else str(path)
