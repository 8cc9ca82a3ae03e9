"""Gathers every fact."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvme_cache.arguments import parse_host_budget
from nvme_cache.bench.machine import version
from nvme_cache.bench.plan import MIB
from nvme_cache.drive import Drive
from nvme_cache.store import default_offload_dir, private_folder, remove_orphans, tested_drive

from .accelerator import AcceleratorFacts, accelerator_facts
from .drive import DriveFacts, measure_drive
from .folder import FolderFacts, folder_facts
from .formats import FormatFacts, format_facts
from .memory import MemoryFacts, memory_facts
from .processor import ProcessorFacts, processor_facts

_PACKAGES = ("nvme-cache", "torch", "transformers", "safetensors")
_LAYER_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True)
class Depth:
    """How far ahead layers of one size are fetched.

    Attributes:
        layer_bytes: Keys and values of a layer.
        prefetch_depth: Layers under way.
    """

    layer_bytes: int
    prefetch_depth: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What a cache chooses where it is told nothing.

    Attributes:
        is_default_folder: Whether shards go to the folder examined; else it is to be passed.
        host_budget_bytes: What `host_budget="auto"` is now.
        io_threads: Threads that read.
        is_drive_tested: Whether threads and depths follow from a test of the drive; else a common one is assumed.
        drive_bytes_per_s: The rate at which the test read, or that is assumed.
        prefetch_depths: By size of a layer.
    """

    is_default_folder: bool
    host_budget_bytes: int
    io_threads: int
    is_drive_tested: bool
    drive_bytes_per_s: float
    prefetch_depths: Sequence[Depth]


@dataclass(frozen=True, slots=True)
class Findings:
    """Every fact.

    Attributes:
        folder: Where shards would go.
        memory: Of this machine.
        drive: Under the folder; None if it could not be measured.
        drive_failure: Why not; None if it could.
        processor: Of this machine.
        accelerator: None where there is none.
        formats: Ways to store blocks, exactly first; empty if the drive could not be measured.
        settings: What follows for a cache.
        versions: By name; None for what is not installed.
    """

    folder: FolderFacts
    memory: MemoryFacts
    drive: DriveFacts | None
    drive_failure: str | None
    processor: ProcessorFacts
    accelerator: AcceleratorFacts | None
    formats: Sequence[FormatFacts]
    settings: Settings
    versions: Mapping[str, str | None]


def examine(asked: Path | None) -> Findings:
    """What this machine gives to caches in a folder; None for the default one. Takes some five seconds.

    Raises:
        OffloadDirectoryError: the folder is missing, not a folder, or not writable.
    """
    folder = default_offload_dir() if asked is None else asked
    with private_folder(folder) as own:
        place = folder_facts(folder, own, remove_orphans(folder))
        chosen = tested_drive(own, None, direct=place.takes_direct)
        drive, failure = _measured(own, place, chosen)
    processor, accelerator, formats = processor_facts(), accelerator_facts(), []
    if drive is not None:
        on_device = accelerator is not None
        formats = format_facts(drive.best_bytes_per_s, processor.usable_cores, on_device=on_device)
    return Findings(
        place,
        memory_facts(),
        drive,
        failure,
        processor,
        accelerator,
        formats,
        _settings(chosen, is_default_folder=asked is None),
        {**{name: version(name) for name in _PACKAGES}, "python": platform.python_version(), "kernel": _kernel()},
    )


def _measured(own: Path, place: FolderFacts, chosen: Drive) -> tuple[DriveFacts | None, str | None]:
    try:
        return measure_drive(own, place.free_bytes, chosen.io_threads, direct=place.takes_direct), None
    except OSError as error:
        return None, error.strerror or str(error)


def _settings(chosen: Drive, *, is_default_folder: bool) -> Settings:
    depths = [Depth(layer_bytes, chosen.prefetch_depth(layer_bytes)) for layer_bytes in _LAYER_BYTES]
    return Settings(
        is_default_folder,
        parse_host_budget("auto"),
        chosen.io_threads,
        is_drive_tested=chosen != Drive(),
        drive_bytes_per_s=chosen.read_bytes_per_s,
        prefetch_depths=depths,
    )


def _kernel() -> str:
    return f"{platform.system()} {platform.release()}"
