"""What runs in a contender's own process: a model, and one cache at a time."""

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import xxhash
from transformers import DynamicCache

from nvme_cache import OffloadedNVMeCache
from nvme_cache.attention import STREAMING

from .contenders import ATTENDS_STREAMING, make_cache, make_cold
from .models import fill, forward, random_model, smollm2_config

_SPARE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is to do.

    Attributes:
        contender: Name of the cache.
        num_layers: Layers of the model.
        folder: Empty folder of its own.
        direct: Whether the file system takes `O_DIRECT`.
    """

    contender: str
    num_layers: int
    folder: Path
    direct: bool


@dataclass(frozen=True, slots=True)
class Burst:
    """Steps timed in a row.

    Attributes:
        step_s: Seconds a step.
        cpu_s: CPU seconds a step.
        read_bytes: Keys and values read from files a step.
        drive_bytes: Bytes that this process had the drive read a step, as the kernel counts them.
        digests: Of the logits, those of the untimed step first.
        peak_bytes: Most memory used above the model's own.
    """

    step_s: float
    cpu_s: float
    read_bytes: int
    drive_bytes: int
    digests: list[int]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt processed.

    Attributes:
        wall_s: Seconds until the forward returned.
        cpu_s: CPU seconds meanwhile.
        written_s: Seconds until everything was on the drive.
        written_bytes: Keys and values written to it.
        digest: Of the last logits.
    """

    wall_s: float
    cpu_s: float
    written_s: float
    written_bytes: int
    digest: int


class Contestant:
    """A model, and one cache at a time.

    Args:
        task: Which, and where.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._config = smollm2_config(task.num_layers)
        self._model = random_model(self._config)
        if task.contender in ATTENDS_STREAMING:
            self._model.set_attn_implementation(STREAMING)
        self._forward(DynamicCache(config=self._config), 0)  # what the model allocates once
        self._baseline_bytes = status_bytes("VmRSS")
        self._cache: DynamicCache | None = None
        self._length = 0

    def begin(self, length: int) -> None:
        """Makes a new cache that holds `length` random tokens."""
        self.end()
        self._cache = make_cache(self._task.contender, self._config, self._task.folder, length, _SPARE_TOKENS)
        self.extend(length)

    def extend(self, length: int) -> None:
        """Fills the cache up to `length` random tokens."""
        fill(self._held, self._config, self._length, length)
        self._length = length
        self._settle()

    def step(self, count: int) -> Burst:
        """Times `count` cold steps, after one that is not timed: what was fetched ahead meanwhile counts for nobody."""
        forget_peak()
        digests = [self._cold_step()[2]]
        reads, drive = self._read_bytes(), _drive_bytes()
        walls, cpus = 0.0, 0.0
        for _ in range(count):
            wall, cpu, digest = self._cold_step()
            walls, cpus = walls + wall, cpus + cpu
            digests.append(digest)
        return Burst(
            step_s=walls / count,
            cpu_s=cpus / count,
            read_bytes=(self._read_bytes() - reads) // count if self._is_ours else self._file_bytes(),
            drive_bytes=(_drive_bytes() - drive) // count,
            digests=digests,
            peak_bytes=status_bytes("VmHWM") - self._baseline_bytes,
        )

    def prefill(self, length: int) -> Prefill:
        """Processes a prompt of `length` random tokens with a new cache."""
        self.end()
        self._cache = make_cache(self._task.contender, self._config, self._task.folder, length, _SPARE_TOKENS)
        ids = torch.randint(0, self._config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        cpu, began = time.process_time(), time.perf_counter()
        logits = forward(self._model, self._cache, ids, 0)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        self._settle()
        written_s = time.perf_counter() - began
        self._length = length
        return Prefill(wall_s, cpu_s, written_s, self.written()[0], _digest(logits))

    def written(self) -> tuple[int, int]:
        """Bytes of keys and values this cache has written and has sealed so far: 0 if it is not ours."""
        if not isinstance(self._cache, OffloadedNVMeCache):
            return 0, 0
        meter = self._cache._pager.meter
        return meter.written_bytes, meter.sealed_bytes

    def end(self) -> None:
        """Gives up the cache and its files."""
        if isinstance(self._cache, OffloadedNVMeCache):
            self._cache.close()
        self._cache = None
        self._length = 0
        for path in self._task.folder.rglob("*"):
            if path.is_file():
                path.unlink()

    @property
    def _held(self) -> DynamicCache:
        assert self._cache is not None, "begin comes first"
        return self._cache

    @property
    def _is_ours(self) -> bool:
        return isinstance(self._cache, OffloadedNVMeCache)

    def _cold_step(self) -> tuple[float, float, int]:
        make_cold(self._held, self._task.folder, direct=self._task.direct)
        cpu, began = time.process_time(), time.perf_counter()
        logits = self._forward(self._held, self._length)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        self._length += 1
        return wall_s, cpu_s, _digest(logits)

    def _forward(self, cache: DynamicCache, position: int) -> torch.Tensor:
        return forward(self._model, cache, torch.tensor([[1 + position % 1000]]), position)

    def _settle(self) -> None:
        if isinstance(self._cache, OffloadedNVMeCache):
            self._cache._pager.flush()
            self._cache._pager.check()

    def _read_bytes(self) -> int:
        return self._cache._pager.meter.read_bytes if isinstance(self._cache, OffloadedNVMeCache) else 0

    def _file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._task.folder.rglob("*") if path.is_file())


def _digest(logits: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(logits.contiguous().view(torch.uint8).numpy().data))


def _drive_bytes() -> int:
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (psutil.Error, AttributeError, NotImplementedError):
        return 0


def forget_peak() -> None:
    """The memory peak begins anew, from what is in use: what filling the cache left to the allocator goes back."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # where it may not be reset, it is the peak of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(field: str) -> int:
    """What the kernel says of this process's memory, such as "VmRSS"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
