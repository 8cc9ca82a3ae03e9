"""fio, the usual measure of drives, where it is installed.

Its buffers are given huge pages, as ours have: with 4 KiB pages the same fio reads at half the rate or less.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Sample

_TIMEOUT_S = 120
_BUFFERS_BYTES = 64 << 20  # more in flight gains nothing, and costs faulting it in
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # malloc then asks for them, as madvise does
_RAMP = "200ms"  # faults its buffers in


class FioFailedError(Exception):
    """fio is not installed, or does not run this way here."""


@dataclass(frozen=True, slots=True)
class Fio:
    """fio with one I/O engine: `psync` reads as threads do, `io_uring` queues requests from one thread."""

    engine: str

    def read(self, path: Path, request_bytes: int, *, runtime_s: float, threads: int) -> Sample:
        """Reads all of `path`, with `O_DIRECT`, again and again for `runtime_s` seconds.

        Args:
            path: Existing file.
            request_bytes: Size of a read.
            runtime_s: Seconds to read for.
            threads: Threads of the psync engine, each with a part of the file of its own; io_uring has one.

        Raises:
            FioFailedError: fio said so.
        """
        jobs = threads if self.engine == "psync" else 1
        part = path.stat().st_size // jobs
        return self._run(
            path,
            request_bytes,
            "--rw=read",
            "--readonly",
            f"--size={part}",
            f"--numjobs={jobs}",
            f"--offset_increment={part}",
            "--time_based",
            f"--ramp_time={_RAMP}",
            f"--runtime={round(runtime_s * 1000)}ms",
        )

    def write(self, path: Path, request_bytes: int, nbytes: int, *, overwrite: bool) -> Sample:
        """Writes `nbytes` bytes, with `O_DIRECT`, from one thread.

        Args:
            path: A new file, which is deleted again; or an existing one to overwrite.
            request_bytes: Size of a write.
            nbytes: Bytes in all.
            overwrite: Whether the file exists and stays.

        Raises:
            FioFailedError: fio said so.
        """
        return self._run(
            path,
            request_bytes,
            "--rw=write",
            f"--size={nbytes}",
            *(["--overwrite=1"] if overwrite else ["--fallocate=posix", "--unlink=1"]),
        )

    def _run(self, path: Path, request_bytes: int, *options: str) -> Sample:
        command = [
            *("fio", "--name=bench", f"--filename={path}", "--direct=1", "--thread", "--output-format=json"),
            *(f"--ioengine={self.engine}", f"--bs={request_bytes}", "--iomem=malloc", "--iomem_align=2m"),
            *options,
        ]
        if self.engine != "psync":
            command.append(f"--iodepth={max(1, min(8, _BUFFERS_BYTES // request_bytes))}")
        try:
            run = subprocess.run(
                command,
                env=os.environ | _HUGE_PAGES,
                cwd=path.parent,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FioFailedError(f"fio: {error}") from error
        try:
            return _sample(json.loads(run.stdout[run.stdout.index("{") :])["jobs"])
        except (ValueError, KeyError, ZeroDivisionError) as error:
            said = (run.stderr or run.stdout).strip().splitlines()[:1]
            raise FioFailedError(f"fio --ioengine={self.engine} failed: {' '.join(said) or error}") from error


def working_engines(path: Path) -> tuple[list[Fio], list[str]]:
    """The engines that can read `path` here, and why others cannot."""
    if shutil.which("fio") is None:
        return [], ["fio is not installed (apt-get install fio): no comparison with it"]
    working, reasons = [], []
    for engine in (Fio("psync"), Fio("io_uring")):
        try:
            engine.read(path, 1 << 20, runtime_s=0.01, threads=1)
            working.append(engine)
        except FioFailedError as error:
            reasons.append(str(error))
    return working, reasons


def _sample(jobs: list[dict[str, Any]]) -> Sample:
    """The jobs of one run together: as long as the longest of them."""
    moved = [job["read"] if job["read"]["io_bytes"] else job["write"] for job in jobs]
    if any(job["error"] for job in jobs):
        raise ValueError(f"error {jobs[0]['error']}")
    sample = Sample(
        wall_s=max(part["runtime"] for part in moved) / 1e3,
        cpu_s=sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs),
        nbytes=sum(part["io_bytes"] for part in moved),
    )
    if not sample.nbytes or not sample.wall_s:
        raise ValueError("nothing was moved")
    return sample
