"""The whole bench: every part in turn, what they found as JSON, tables and charts."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from nvme_cache.drive import Drive, drive_of
from nvme_cache.errors import StorageFullError

from .charts import draw
from .drive import measure_drive, write_rate
from .fio import working_engines
from .growth import measure_growth
from .machine import describe
from .measure import Figures
from .models import smollm2_config, token_bytes, wide_config
from .peers import measure_peers, measure_prefill, workers
from .plan import FULL, QUICK, Plan
from .rawfile import RawFile
from .report import tables
from .site import Site
from .steps import SHARES, measure_steps

FORMAT_VERSION = 1
_LEAST_SPARE_BYTES = 1 << 30


def run_bench(folder: Path, out: Path, *, quick: bool, console: Console) -> Path:
    """Measures everything on the drive under `folder` and leaves `bench.json` and charts in `out`.

    Args:
        folder: Existing folder on the drive; what is put there is gone at the end.
        out: Folder for the results, made if missing.
        quick: Whether only to show that everything runs; the figures then mean little.
        console: Where progress and tables go.

    Returns:
        The path of the JSON file.

    Raises:
        StorageFullError: the drive has too little room.
    """
    plan = QUICK if quick else FULL
    _check_room(folder, plan)
    out.mkdir(parents=True, exist_ok=True)
    path, began = out / "bench.json", time.perf_counter()
    results: Figures = {"format_version": FORMAT_VERSION, "quick": quick, "machine": describe(folder), "notes": []}

    def say(line: str) -> None:
        console.print(f"[dim]{time.perf_counter() - began:5.0f} s[/dim]  {escape(line)}", highlight=False)

    def keep(section: str, measure: Callable[[], Figures]) -> None:
        results[section] = measure()
        results["elapsed_s"] = time.perf_counter() - began
        path.write_text(json.dumps(results, indent=1))  # what has been measured survives what comes after

    with tempfile.TemporaryDirectory(prefix="nvme-cache-bench-", dir=folder) as own_folder:
        direct = results["machine"]["direct_io"]
        drive = drive_of(Path(own_folder)) if direct else Drive()
        site = Site(Path(own_folder), direct, drive.io_threads, plan, say)
        with ExitStack() as stack:
            raw = stack.enter_context(RawFile(site, plan.sample_bytes))
            engines, reasons = working_engines(raw.path)
            results["notes"] += reasons
            keep("drive", lambda: measure_drive(site, raw, engines))
            keep("steps", lambda: measure_steps(site, raw, results["drive"]))
            contenders = stack.enter_context(workers(site))
            keep("peers", lambda: measure_peers(site, raw, contenders))
            keep("prefill", lambda: measure_prefill(site, contenders, write_rate(results["drive"])))
            keep("growth", lambda: measure_growth(site, contenders))
    for table in tables(results):
        console.print(table)
    for line in [*results["notes"], *draw(results, out)]:
        say(line)
    return path


def _check_room(folder: Path, plan: Plan) -> None:
    """Raises if the drive cannot hold what lies there at the same time at most."""
    on_drive = sum(1 - share for share in SHARES) + 1  # the last for quantized blocks
    steps = max(plan.step_contexts) * token_bytes(wide_config(1)) * plan.step_layers * on_drive
    peers = max(plan.peer_contexts) * token_bytes(smollm2_config(1)) * plan.model_layers * 7
    needed = int(max(steps + plan.sample_bytes, peers, 4 * plan.sample_bytes)) + _LEAST_SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageFullError(
            f"the bench needs {needed:,} bytes on {os.fspath(folder)}, which has {free:,} free. Free some, or pass a "
            "folder on another drive."
        )
