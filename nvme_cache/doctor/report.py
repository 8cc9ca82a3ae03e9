"""Findings as two columns of text, which survive being pasted, and as JSON."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvme_cache.bench.charts import size_text

from .accelerator import AcceleratorFacts
from .drive import DriveFacts
from .findings import Findings, Settings
from .folder import FolderFacts
from .formats import FormatFacts
from .memory import MemoryFacts
from .problems import problems
from .processor import ProcessorFacts

_LABEL_WIDTH = 17
_BAR_WIDTH = 40


def as_json(found: Findings) -> str:
    """Every fact and problem; the end of a key is its unit."""
    return json.dumps({**dataclasses.asdict(found), "problems": problems(found)}, indent=1)


def as_text(found: Findings) -> RenderableType:
    """Sections of facts, problems last."""
    return Group(
        _section("Folder", _folder(found.folder)),
        _section("Memory", _memory(found.memory, has_accelerator=found.accelerator is not None)),
        _section("Drive", _drive(found.drive) if found.drive else [("", f"not measured: {found.drive_failure}")]),
        _section("Processor", _processor(found.processor)),
        _section("Accelerator", _accelerator(found.accelerator)),
        _section("Keys and values", _formats(found.formats)),
        _section("Versions", ((name, number or "not installed") for name, number in found.versions.items())),
        _section("Default settings here", _settings(found.folder, found.settings)),
        _problems(problems(found)),
    )


def _section(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL_WIDTH)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(f"  {label}"), Text(value))
    return Group(Text(title, style="bold cyan"), table, "")


def _problems(lines: list[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=3)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(Text("  !", style="bold yellow"), Text(line))
    found = table if lines else Text("  No problems found.", style="green")
    return Group(Text("Problems", style="bold cyan"), found)


def _folder(folder: FolderFacts) -> Iterator[tuple[str, str]]:
    device = " ".join(part for part in (folder.device, folder.device_model) if part)
    yield "path", folder.path
    yield "file system", f"{folder.file_system}, {folder.kind}" + (f", on {device}" if device else "")
    if folder.kind == "RAM":
        yield "O_DIRECT", "of no use, the files themselves are in memory"
    else:
        yield "O_DIRECT", "yes, past the page cache" if folder.takes_direct else "no, reads go through the page cache"
    yield "free space", f"{_gib(folder.free_bytes)} of {_gib(folder.total_bytes)}, writable"
    if folder.file_limit_bytes is not None:
        yield "longest file", size_text(folder.file_limit_bytes)


def _memory(memory: MemoryFacts, *, has_accelerator: bool) -> Iterator[tuple[str, str]]:
    yield "available", f"{_gib(memory.available_bytes)} of {_gib(memory.total_bytes)}"
    if memory.group_limit_bytes is not None and memory.group_used_bytes is not None:
        yield "control group", f"{_gib(memory.group_used_bytes)} of {_gib(memory.group_limit_bytes)} used"
    setting = f"(kernel: {memory.huge_page_setting})"
    if memory.buffer_huge_page_bytes is None:
        yield "huge pages", f"the kernel does not tell {setting}"
    else:
        got, wanted = size_text(memory.buffer_huge_page_bytes), size_text(memory.buffer_bytes)
        yield "huge pages", f"{got} of a buffer of {wanted} {setting}"
    yield "open files", "unlimited" if memory.open_files_limit is None else f"{memory.open_files_limit:,} at most"
    if has_accelerator:
        limit = memory.locked_limit_bytes
        yield "locked memory", "unlimited" if limit is None else f"{size_text(limit)} at most"


def _drive(drive: DriveFacts) -> Iterator[tuple[str, str]]:
    yield "writes", f"{_rate(drive.write_bytes_per_s)}, new file"
    for number, read in enumerate(drive.reads):
        bar = "#" * round(_BAR_WIDTH * read.bytes_per_s / drive.best_bytes_per_s)
        label = "" if number else "reads"
        yield f"{label:<5}{size_text(read.request_bytes):>9}", f"{_rate(read.bytes_per_s)}  {bar}"
    for found in drive.latencies:
        times = "  ".join(
            f"{name} {seconds * 1e6:,.0f} us"
            for name, seconds in (("P50", found.p50_s), ("P95", found.p95_s), ("P99", found.p99_s))
        )
        yield f"random {size_text(found.request_bytes)}", f"{times}  ({found.reads:,} reads)"


def _processor(processor: ProcessorFacts) -> Iterator[tuple[str, str]]:
    quota = "" if processor.quota_cores is None else f", time for {processor.quota_cores:g}"
    yield "cores", f"{processor.cores}{quota}, {processor.name}"
    yield "memory copy", _rate(processor.copy_bytes_per_s)
    yield "verifying", f"{_rate(processor.verify_bytes_per_s)} a core (xxh3)"
    yield "switch interval", f"{processor.switch_interval_s * 1e3:g} ms"


def _accelerator(accelerator: AcceleratorFacts | None) -> Iterator[tuple[str, str]]:
    if accelerator is None:
        yield "none", ""
        return
    yield "name", accelerator.name
    yield "memory", f"{_gib(accelerator.free_bytes)} of {_gib(accelerator.total_bytes)} free"
    to, back = accelerator.to_device_bytes_per_s, accelerator.from_device_bytes_per_s
    if to is None or back is None:
        yield "link", "no memory could be pinned"
    else:
        yield "link", f"{_rate(to)} to the device, {_rate(back)} back, pinned"


def _formats(formats: Sequence[FormatFacts]) -> Iterator[tuple[str, str]]:
    if not formats:
        yield "", "the drive was not measured"
        return
    fastest = max(formats, key=lambda found: found.read_bytes_per_s)
    for found in formats:
        rate = found.dequantize_bytes_per_s
        own = "" if rate is None else f"; a core dequantizes {_rate(rate)}"
        mark = ", the fastest here" if found is fastest else ""
        yield found.name, f"at most {_rate(found.read_bytes_per_s)}{mark}{own}"


def _settings(folder: FolderFacts, settings: Settings) -> Iterator[tuple[str, str]]:
    yield "offload_dir", folder.path if settings.is_default_folder else f"{folder.path}, if you pass it"
    yield "host_budget", f'{_gib(settings.host_budget_bytes)} ("auto")'
    why = "a test of the drive read at" if settings.is_drive_tested else "drive not tested, taken for one of"
    yield "io_threads", f"{settings.io_threads} ({why} {_rate(settings.drive_bytes_per_s)})"
    depths = (f"{size_text(depth.layer_bytes)}: {depth.prefetch_depth}" for depth in settings.prefetch_depths)
    yield "prefetch_depth", f"layers of {', '.join(depths)}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
