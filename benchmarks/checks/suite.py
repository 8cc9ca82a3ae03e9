"""The project's own tests for accelerators, in a process of their own."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .run import Run, SkippedError

ROOT = Path(__file__).parents[2]
_LEAST_S = 20  # below this not even the imports would finish
_SUMMARY_S = 8
_TAIL = 6000  # characters


def check(run: Run, results: dict[str, Any]) -> None:
    """Fills `results` with pytest's counts and the end of its output."""
    if run.quick or run.device.is_cpu:
        raise SkippedError("left out of the reduced form")
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    if run.left_s() < _LEAST_S:
        raise SkippedError(f"{run.left_s():.0f} s are left")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/test_gpu.py", "-q", "--tb=short"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "4"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, results["timed_out"] = _finish(process, run.left_s())
    finally:
        process.kill()
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", output[-_TAIL:])
    results["counts"] = {kind: int(count) for count, kind in counts}
    results["returncode"], results["tail"] = process.returncode, output[-_TAIL:]
    if set(results["counts"]) & {"failed", "error", "errors"} or (process.returncode and not results["timed_out"]):
        run.problem(f"pytest ended with status {process.returncode}: {results['counts']}")


def _finish(process: subprocess.Popen[str], within_s: float) -> tuple[str, bool]:
    """The process's output, and whether it had to be interrupted: pytest then tells what it has found so far."""
    try:
        return process.communicate(timeout=within_s)[0], False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_SUMMARY_S)[0], True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], True
