"""Writing shards behind the model's back: one thread, errors kept until the owner calls, failed writes tried again."""

import errno
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .buffers import HostBuffer, StagingPool
from .errors import NVMeCacheError, ShardIOError, StorageFullError
from .meter import Meter
from .shards import Shard
from .states import States
from .transfer import Event


@dataclass(frozen=True, slots=True)
class Write:
    """A shard on its way to the drive, with what its copies still need.

    Attributes:
        shard: What to write.
        staging: Where the buffers return to.
        buffers: The bytes, one buffer a section.
        states: What the side stream copies from; must stay as it is until `event`.
        event: Passed once the buffers are filled.
    """

    shard: Shard
    staging: StagingPool
    buffers: list[HostBuffer]
    states: list[States]
    event: Event


class Writer:
    """Writes shards in the order given.

    Args:
        executor: Where writing happens: one thread.
        meter: Counts the bytes written.
    """

    def __init__(self, executor: ThreadPoolExecutor, meter: Meter) -> None:
        self._executor = executor
        self._meter = meter
        self._failed: deque[tuple[Write, NVMeCacheError]] = deque()

    def submit(self, write: Write) -> None:
        """Queues a write; the shard's `written` resolves with it."""
        write.shard.written = self._executor.submit(_run, write, self._failed, self._meter)

    def hold(self, event: Event, *held: object) -> None:
        """Keeps objects alive until `event`: their memory must not be reused while the side stream works on it."""
        self._executor.submit(_hold, event, *held)

    def flush(self) -> None:
        """Waits until everything given so far is done, well or not."""
        self._executor.submit(int).result()

    @property
    def has_failed(self) -> bool:
        """Whether `check` will raise."""
        return bool(self._failed)

    def check(self) -> None:
        """Raises the first failure since the last call, and tries all failed writes again.

        Raises:
            StorageFullError: the drive was full.
            ShardIOError: the drive refused.
        """
        if not self._failed:
            return
        failed = [self._failed.popleft() for _ in range(len(self._failed))]
        outcomes = [write.shard.written for write, _ in failed]
        for write, _ in failed:
            write.staging.fail(None)
        try:
            for write, _ in failed:
                self.submit(write)
        except BaseException:  # an interrupt: those not given again must not be lost, nor the others written twice
            pairs = zip(failed, outcomes, strict=True)
            self._failed.extend(pair for pair, outcome in pairs if pair[0].shard.written is outcome)
            raise
        raise failed[0][1]


def _run(write: Write, failed: deque[tuple[Write, NVMeCacheError]], meter: Meter) -> None:
    write.event.synchronize()
    write.states.clear()
    try:
        write.shard.write(write.buffers)
    except Exception as error:
        # The buffers hold the only copy of these tokens until the write is tried again.
        explained = _explained(error, write.shard)
        failed.append((write, explained))
        write.staging.fail(explained)
        raise explained from error
    meter.written_bytes += write.shard.nbytes
    for buffer in write.buffers:
        write.staging.release(buffer, write.event)


def _hold(event: Event, *held: object) -> None:
    event.synchronize()


def _explained(error: Exception, shard: Shard) -> NVMeCacheError:
    if not isinstance(error, OSError):
        return ShardIOError(f"cannot write shard {shard.path}: {error!r}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFullError(
            error.errno,
            f"no room for shard {shard.path} ({shard.file_nbytes:,} bytes): {error.strerror}. Nothing is lost: free "
            "space and call again, or use an offload_dir on a larger drive.",
        )
    return ShardIOError(
        error.errno, f"cannot write shard {shard.path}: {error.strerror}. Check the drive, then call again."
    )
