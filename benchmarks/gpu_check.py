"""Is it exact on this accelerator, and how near to the floor does it run? One command, under eight minutes.

    python benchmarks/gpu_check.py [--device cuda] [--offload-dir DIR] [--out FILE] [--quick] [--budget-s SECONDS]

Models have random weights, nothing is downloaded, and nothing needs to be installed but what `pyproject.toml` names.
Prints progress and tables; writes everything it found to a JSON file as it goes. Exit status 1 means that something
differed, grew or failed. On CPU the reduced form runs, as `--quick` asks for anywhere.
"""

import argparse
import faulthandler
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout, installed or not

import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

import nvme_cache
from benchmarks.checks import correctness, leaks, overlap, rates, suite
from benchmarks.checks.run import Device, OutOfTimeError, Run, SkippedError
from nvme_cache import io
from nvme_cache.store import default_offload_dir, file_system_of

# In this order, each with its share of the time; what one leaves over the next ones have.
SECTIONS: dict[str, tuple[Callable[[Run, dict[str, Any]], None], float]] = {
    "correctness": (correctness.check, 0.30),
    "rates": (rates.measure, 0.08),
    "overlap": (overlap.measure, 0.36),
    "leaks": (leaks.check, 0.08),
    "tests": (suite.check, 0.18),
}
GRACE_S = 15  # how far a section may overrun before it counts as hanging
HARD_GRACE_S = 45  # likewise for the whole run, where not even an exception gets through


def main() -> int:
    """Runs every section and returns the exit status."""
    arguments = _arguments()
    device = Device(arguments.device)
    folder = arguments.offload_dir or default_offload_dir()
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    run = Run(device, arguments.quick or device.is_cpu, folder, save=lambda: _save(arguments.out, report))
    if device.is_cpu:
        torch.set_num_threads(1)  # these models are too small for threads to do more than wait for each other
    faulthandler.dump_traceback_later(arguments.budget_s + HARD_GRACE_S, exit=True)
    signal.signal(signal.SIGALRM, _out_of_time)
    transformers.logging.set_verbosity_error()
    logging.getLogger("nvme_cache").setLevel(logging.ERROR)
    run.host_memory_bytes = arguments.host_memory_gib and int(arguments.host_memory_gib * (1 << 30))
    run.attentions, left_out = _working_attentions(device)
    report |= {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": run.quick,
        "budget_s": arguments.budget_s,
        "machine": _machine(device, folder),
        "attention": {"compared": list(run.attentions), "left_out": left_out},
        "sections": {},
        "passed": False,
    }
    run.say(f"{device.name}, torch {torch.__version__}, transformers {transformers.__version__}, shards in {folder}")
    share = 0.0
    for name, (section, part) in SECTIONS.items():
        share += part
        run.deadline = run.began + share * arguments.budget_s
        _run_section(run, name, section, report["sections"])
    report["passed"] = all(section["status"] in ("passed", "skipped") for section in report["sections"].values())
    report["elapsed_s"] = run.elapsed_s()
    faulthandler.cancel_dump_traceback_later()
    _print_tables(report)
    run.say(f"{'passed' if report['passed'] else 'FAILED'}; everything measured is in {arguments.out}")
    return 0 if report["passed"] else 1


def _run_section(run: Run, name: str, section: Callable[[Run, dict[str, Any]], None], sections: dict[str, Any]) -> None:
    began, results, run.problems = time.monotonic(), {}, []
    entry: dict[str, Any] = {"status": "running", "problems": run.problems, "results": results}
    sections[name] = entry
    run.say(f"{name}: {run.left_s():.0f} s to use")
    try:
        signal.setitimer(signal.ITIMER_REAL, max(run.left_s(), 0) + GRACE_S)
        section(run, results)
        entry["status"] = "failed" if run.problems else "passed"
    except SkippedError as reason:
        entry |= {"status": "skipped", "reason": str(reason)}
    except (Exception, OutOfTimeError):
        entry |= {"status": "error", "error": traceback.format_exc()}
        print(entry["error"], file=sys.stderr, flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    entry["elapsed_s"] = time.monotonic() - began
    with suppress(Exception):  # a device that has failed fails here too
        run.device.empty_cache()
        run.device.empty_host_cache()
    run.say(f"{name}: {entry['status']} {entry.get('reason', '')}")


def _out_of_time(*_: object) -> None:
    faulthandler.dump_traceback(all_threads=True)  # what every thread was waiting for
    raise OutOfTimeError("the section overran its time")


def _working_attentions(device: Device) -> tuple[tuple[str, ...], str | None]:
    """Eager, and sdpa where the device computes it right (a simulated one may not)."""
    states = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(*states)
    found = torch.nn.functional.scaled_dot_product_attention(*states.to(device.torch)).cpu()
    if torch.allclose(found, expected, atol=1e-2):
        return ("eager", "sdpa"), None
    return ("eager",), "sdpa: it computes something else on this device than on CPU"


def _machine(device: Device, folder: Path) -> dict[str, Any]:
    return {
        "device": device.name,
        "device_memory_bytes": device.total_bytes(),
        "link": _link() if device.torch.type == "cuda" else None,
        "processor": _processor(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "offload_dir": str(folder),
        "file_system": file_system_of(folder),
        "direct_io": io.supports_direct(folder),
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nvme_cache": str(Path(nvme_cache.__file__).parent),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _link() -> str | None:
    """Driver version, PCIe generation and width as nvidia-smi tells them."""
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _save(path: Path, report: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1, default=str) + "\n")
    partial.replace(path)


def _print_tables(report: dict[str, Any]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    summary = Table(title=f"{report['machine']['device']}, {report['elapsed_s']:.0f} s")
    for column in ("section", "status", "seconds", "outcome"):
        summary.add_column(column)
    for name, section in report["sections"].items():
        outcome = section.get("reason") or _outcome(name, section["results"])
        if section["problems"]:
            outcome = f"{len(section['problems'])} problems, first: {section['problems'][0][:200]}"
        summary.add_row(name, section["status"], f"{section['elapsed_s']:.1f}", outcome)
    console.print(summary)
    table = Table(title="decoding one token")
    columns = ("context", "setting", "step ms", "floor ms", "bound", "efficiency", "device GiB", "host GiB", "NVMe GiB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("setting", "bound") else "right")
    for entry in report["sections"]["overlap"]["results"].get("entries", []):
        table.add_row(f"{entry['context']:,}", entry["setting"], *_cells(entry))
    console.print(table)


def _cells(entry: dict[str, Any]) -> list[str]:
    if "step_s" not in entry:
        return ["skipped"]
    floor = ["", "", ""]
    if "floor_s" in entry:
        floor = [f"{entry['floor_s'] * 1e3:.1f}", entry["floor_bound"], f"{entry['efficiency']:.0%}"]
    sizes = [f"{entry[name] / (1 << 30):.2f}" for name in ("peak_device_bytes", "host_bytes", "nvme_bytes")]
    return [f"{entry['step_s'] * 1e3:.1f}", *floor, *sizes]


def _outcome(name: str, results: dict[str, Any]) -> str:
    """A section's results in one line."""
    if name == "correctness" and "repeats" in results:
        matrix, repeats = results["matrix"], results["repeats"]
        same = sum(entry["identical"] for entry in matrix["entries"])
        return (
            f"{same} of {len(matrix['entries'])} combinations identical ({matrix['planned']} planned), "
            f"{repeats['identical']} of {repeats['done']} repeats ({repeats['planned']} planned)"
        )
    if name == "rates" and "best" in results:
        return ", ".join(f"{key.partition('_')[0]} {rate / 1e9:.1f} GB/s" for key, rate in results["best"].items())
    if name == "leaks" and "done" in results:
        return f"flat over {results['done']} generations ({results['planned']} planned)"
    if name == "overlap" and "model" in results:
        return f"{sum('step_s' in entry for entry in results['entries'])} settings measured, see below"
    if "counts" in results:
        return f"{results['counts']}{', cut short' if results['timed_out'] else ''}"
    return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="what to check (default: the accelerator that torch reports, else cpu)")
    parser.add_argument("--quick", action="store_true", help="the reduced form, well under a minute")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file (default: %(default)s)")
    parser.add_argument("--offload-dir", type=Path, help="folder on a fast drive (default: the package's)")
    parser.add_argument(
        "--host-memory-gib",
        type=float,
        help="host memory of the machine, where the system shows less than it will give (default: what it shows)",
    )
    parser.add_argument("--budget-s", type=float, default=420, help="seconds to stay within (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
