"""What stands in the way of paging at the speed of the drive, each with its remedy. Pure: facts in, lines out."""

from collections.abc import Iterator

from .accelerator import AcceleratorFacts
from .drive import SHARD_BYTES, DriveFacts
from .findings import Findings
from .folder import FolderFacts
from .memory import MemoryFacts
from .processor import ProcessorFacts

_LITTLE_SPACE_BYTES = 8 << 30
_EXAMPLE_TOKEN_BYTES = 128 << 10  # Llama-3.1-8B in bf16
_LITTLE_MEMORY_BYTES = 1 << 30
_FEW_FILES = 1024
_SLOW_BYTES_PER_S = 1e9
_GIB, _MIB = 1 << 30, 1 << 20


def problems(found: Findings) -> list[str]:
    """One line a problem, the remedy in it."""
    return [
        *_folder(found.folder),
        *_orphans(found.folder),
        *_drive(found.folder, found.drive, found.drive_failure),
        *_memory(found.memory),
        *_pinning(found.memory, found.accelerator),
        *_processor(found.processor),
    ]


def _folder(folder: FolderFacts) -> Iterator[str]:
    system = folder.file_system
    if folder.kind == "RAM":
        yield f"The folder is a {system}: its files live in RAM, so paging there saves none. Use a folder on a drive."
    elif folder.kind == "network":
        yield f"The folder is on the network ({system}). Use a folder on a drive of this machine."
    if not folder.takes_direct and folder.kind != "RAM":
        yield (
            f"{system} refuses O_DIRECT or caches all the same, so memory fills with what is read and written. "
            "Use a folder on ext4 or xfs."
        )
    if folder.free_bytes < _LITTLE_SPACE_BYTES:
        tokens = folder.free_bytes // _EXAMPLE_TOKEN_BYTES
        yield (
            f"Only {folder.free_bytes / _GIB:.1f} GiB free, {tokens:,} tokens of a model like Llama-3.1-8B. "
            "Free some, or use a folder on a larger drive."
        )
    if folder.file_limit_bytes is not None and folder.file_limit_bytes < SHARD_BYTES + _MIB:  # shards have a header
        yield (
            f"Files may be {folder.file_limit_bytes / _MIB:.1f} MiB long at most, shards have up to "
            f"{SHARD_BYTES / _MIB:.0f} MiB. Raise the limit: ulimit -f unlimited."
        )


def _orphans(folder: FolderFacts) -> Iterator[str]:
    if folder.removed_orphans:
        yield f"Caches whose process died had left {', '.join(folder.removed_orphans)}. Removed: nothing is to be done."


def _drive(folder: FolderFacts, drive: DriveFacts | None, failure: str | None) -> Iterator[str]:
    if drive is None:
        yield f"The drive could not be measured: {failure}. Free space, or look at quotas and at the kernel's log."
    elif folder.kind == "local" and drive.best_bytes_per_s < _SLOW_BYTES_PER_S:
        rate = f"{drive.best_bytes_per_s / 1e9:.2f} GB/s"
        if folder.is_rotational:
            yield f"The drive says it is rotational, and reads at {rate}. Use a folder on an NVMe drive."
        else:
            yield (
                f"The drive reads at {rate}, far below an NVMe drive. Use a folder on one; if this is one, look for "
                "others who use it, its temperature, its link, encryption."
            )


def _memory(memory: MemoryFacts) -> Iterator[str]:
    got = memory.buffer_huge_page_bytes
    if got is not None and got < memory.buffer_bytes / 2:
        yield f"Buffers get no huge pages, so reads are slower and cost more CPU. {_huge_page_remedy(memory)}"
    if memory.usable_bytes < _LITTLE_MEMORY_BYTES:
        yield (
            f"Only {memory.usable_bytes / _MIB:,.0f} MiB of memory left, which the model needs. Close other programs, "
            "and pass host_budget=0."
        )
    if memory.open_files_limit is not None and memory.open_files_limit < _FEW_FILES:
        yield (
            f"Only {memory.open_files_limit} files may be open, so shards are opened anew for each read. Raise the "
            "limit: ulimit -n 8192."
        )


def _huge_page_remedy(memory: MemoryFacts) -> str:
    setting = "/sys/kernel/mm/transparent_hugepage/enabled"
    if memory.huge_page_setting in ("always", "madvise"):
        return (
            f'The kernel is set to "{memory.huge_page_setting}", so memory is in pieces: as root, echo 1 > '
            "/proc/sys/vm/compact_memory."
        )
    return f'The kernel is set to "{memory.huge_page_setting}": as root, echo madvise > {setting}.'


def _pinning(memory: MemoryFacts, accelerator: AcceleratorFacts | None) -> Iterator[str]:
    if accelerator is not None and accelerator.to_device_bytes_per_s is None:
        limit = memory.locked_limit_bytes
        allowed = "unlimited" if limit is None else f"{limit / _MIB:.0f} MiB"
        yield (
            f"No memory could be pinned for {accelerator.name} (ulimit -l is {allowed}). Raise the limit, ulimit -l "
            "unlimited, or free memory of the device."
        )


def _processor(processor: ProcessorFacts) -> Iterator[str]:
    if processor.usable_cores < 2:
        yield (
            f"Cores to run on: {processor.usable_cores:g}, so reading and computing wait for each other. Allow two or "
            "more (taskset, limits of the container)."
        )
