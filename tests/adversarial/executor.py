"""An accelerator played by the CPU, which does what the declared dependencies allow, not what one hopes for.

The model's computation runs at once. What goes to the side stream is queued, and done as late as possible: when the
host or the computation waits for it, or before, wherever `progress` says so. A missing wait on that side therefore
gives wrong bytes. The other side, a side stream that is ahead of the computation, shows in vector clocks: every
operation of the model and every copy says what memory it reads and writes, and two that nothing orders raise a
`HazardError`.

Modelled as CUDA has it, and no more: order within a stream; events that stand for what was enqueued when they were
recorded; device memory that goes, when dropped, to whoever computes next on the stream it was made on, so that what is
still queued finds other bytes in it; pinned memory that outlives the copies that use it, but not their order;
copies between host and device that keep up only if they are contiguous.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nvme_cache import pager
from nvme_cache.transfer import HostTransfer, Timestamp

POISON = 0xFF  # NaN in every float format


class HazardError(AssertionError):
    """Two operations on the same memory, nothing ordering them."""


def late(queued: int) -> int:
    """Nothing is done before it must."""
    return 0


def early(queued: int) -> int:
    """Everything is done at once."""
    return queued


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors among `values`, some of which may be lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@functools.cache
def memory_arguments(function) -> list[tuple[int, str, bool]]:
    """Place, name and whether it is written, of the arguments whose memory is touched: all but those viewed."""
    return [
        (index, argument.name, argument.alias_info is not None)
        for index, argument in enumerate(function._schema.arguments)
        if argument.alias_info is None or argument.alias_info.is_write
    ]


@functools.cache
def makes_memory(function) -> bool:
    """Whether the results are new memory."""
    return any(returned.alias_info is None for returned in function._schema.returns)


@dataclass(eq=False)
class Stream:
    """A stream: how much was enqueued, and how much of every stream is known to be done before what comes next."""

    name: str
    length: int = 0
    knows: dict["Stream", int] = field(default_factory=dict)

    def learn(self, clock: dict["Stream", int]) -> None:
        for stream, length in clock.items():
            self.knows[stream] = max(self.knows.get(stream, 0), length)

    def clock(self) -> dict["Stream", int]:
        return {**self.knows, self: self.length}


@dataclass
class Event:
    """What was enqueued on a stream when it was recorded."""

    executor: "Executor"
    clock: dict[Stream, int]

    def synchronize(self) -> None:
        self.executor.reach(self)


@dataclass
class Memory:
    """A view that does not keep its storage alive, unless whoever owns it does so for the copies' sake."""

    storage: StorageWeakRef
    kept: torch.Tensor | None
    dtype: torch.dtype
    place: tuple

    def view(self) -> torch.Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return None if storage is None else torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


@dataclass
class Uses:
    """When each stream last read and wrote a storage."""

    storage: StorageWeakRef
    reads: dict[Stream, int] = field(default_factory=dict)
    writes: dict[Stream, int] = field(default_factory=dict)


class Executor(TorchDispatchMode):
    """In a `with`, what the package's pagers use instead of a device; watches what the model computes.

    Args:
        progress: Given the number of copies queued, how many to do now; asked at every call.
    """

    def __init__(self, progress: Callable[[int], int]) -> None:
        super().__init__()
        self.progress = progress
        self.hazards: list[str] = []
        self.computing = Stream("compute")
        self.side = Stream("side")
        self.copies = self.crossings = 0
        self._lock = threading.RLock()
        self._thread = threading.get_ident()  # where the model runs
        self._queue: deque[tuple[Callable, list[Memory], list[Memory]]] = deque()
        self._done = 0
        self._uses: dict[int, Uses] = {}
        self._written: dict[int, tuple[Stream, int]] = {}
        self._homes: dict[int, tuple[StorageWeakRef, Stream | None]] = {}  # of pinned memory: None
        self._patch = contextlib.ExitStack()
        self._local = threading.local()

    def __enter__(self):
        original = pager.transfer_for
        pager.transfer_for = lambda device: self
        self._patch.callback(setattr, pager, "transfer_for", original)
        return super().__enter__()

    def __exit__(self, kind, error, traceback):
        super().__exit__(kind, error, traceback)
        self._patch.close()
        if kind is None:
            self.finish()
            assert not self.hazards, self.hazards

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(self._local, "is_copying", False):
            return function(*args, **kwargs)
        with self._lock:
            self._compute(function, args, kwargs)
        results = function(*args, **kwargs)
        if makes_memory(function):
            with self._lock:
                for result in tensors_in([results]):
                    self._computed(result, writes=True)
        return results

    @contextlib.contextmanager
    def stream_of_the_user(self):
        """Computes on another stream, ordered behind and before the present one as a careful user would."""
        outer, self.computing = self.computing, Stream("the user's")
        self.computing.learn(outer.clock())
        try:
            yield
        finally:
            outer.learn(self.computing.clock())
            self.computing = outer

    def finish(self) -> None:
        """Does everything that is queued."""
        with self._lock:
            self._run_until(self.side.length)

    # What the package calls.

    is_host = False

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return self._made(HostTransfer().host_memory(nbytes), None)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return self._made(HostTransfer().device_memory(nbytes), self.computing)

    def stream(self) -> Stream:
        return self.computing

    def mark(self) -> Event:
        with self._lock:
            return Event(self, self.computing.clock())

    def timestamp(self) -> Timestamp:
        return HostTransfer().timestamp()

    def wait(self, event: Event) -> None:
        with self._lock:
            self.computing.learn(event.clock)
            self._run_until(event.clock.get(self.side, 0))

    @contextlib.contextmanager
    def side_stream(self, after: Event):
        with self._lock:
            self.side.learn(after.clock)
        self._local.is_inside = True
        try:
            yield
        finally:
            self._local.is_inside = False

    def empty(self, shape, dtype) -> torch.Tensor:
        assert self._local.is_inside
        with self._copying():
            return self._made(torch.empty(shape, dtype=dtype), self.side)

    def on_device(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.empty(blocks.shape, blocks.dtype) if self._home(blocks) is None else blocks

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._local.is_inside
        with self._lock:
            crosses = (self._home(target) is None) != (self._home(source) is None)
            if crosses and not (target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype):
                self._fail("a copy between host and device that would block the host")
            self.crossings += crosses
            self._enqueue(lambda sources, targets: targets[0].copy_(sources[0]), [source], [target])

    def convert(self, function, source, target) -> None:
        assert self._local.is_inside
        sources, targets = list(tensors_in([source])), list(tensors_in([target]))
        if any(self._home(tensor) is None for tensor in sources + targets):
            self._fail("a conversion of pinned host memory")

        def whole(given, tensors):
            return tensors[0] if given is torch.Tensor else tensors

        kinds = [torch.Tensor if isinstance(given, torch.Tensor) else list for given in (source, target)]

        def run(*tensors):
            function(*map(whole, kinds, tensors))

        with self._lock:
            self._enqueue(run, sources, targets)

    def record(self) -> Event:
        with self._lock:
            return Event(self, self.side.clock())

    def reach(self, event: Event) -> None:
        with self._lock:
            if threading.get_ident() == self._thread:  # whatever it enqueues from here on comes later
                self.computing.learn(event.clock)
            self._run_until(event.clock.get(self.side, 0))

    # How it plays the device.

    def _enqueue(self, run, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self._queue.append((run, list(map(self._remember, sources)), list(map(self._remember, targets))))
        self.side.length += 1
        self.copies += 1
        for tensor in sources:
            self._use(self.side, tensor, writes=False)
        for tensor in targets:
            self._use(self.side, tensor, writes=True)
        self._go_on()

    def _go_on(self) -> None:
        self._run_until(self._done + min(len(self._queue), self.progress(len(self._queue))))

    def _run_until(self, length: int) -> None:
        if self._done >= length:
            return
        with self._copying(), torch.no_grad():
            while self._done < length:
                run, *memories = self._queue.popleft()
                sources, targets = ([memory.view() for memory in own] for own in memories)
                self._done += 1
                if any(target is None for target in targets):
                    self._fail("a copy into memory that was given back")
                elif any(source is None for source in sources):
                    for target in targets:
                        poison = torch.full((target.nbytes,), POISON, dtype=torch.uint8)
                        target.copy_(poison.view(target.dtype).view(target.shape))  # as good as any bytes there now
                else:
                    run(sources, targets)

    def _compute(self, function, args, kwargs) -> None:
        self.computing.length += 1
        self._go_on()
        for index, name, writes in memory_arguments(function):
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in tensors_in([value]):
                self._computed(tensor, writes=writes)

    def _computed(self, tensor: torch.Tensor, *, writes: bool) -> None:
        storage = tensor.untyped_storage()._cdata
        if writes:
            self._written[storage] = self.computing, self.computing.length
        if storage in self._uses or storage in self._homes:  # nothing else is ever used on the side stream
            self._use(self.computing, tensor, writes=writes)

    def _use(self, stream: Stream, tensor: torch.Tensor, *, writes: bool) -> None:
        storage = tensor.untyped_storage()
        uses = self._uses.get(storage._cdata)
        if uses is None or uses.storage.expired():
            uses = self._uses[storage._cdata] = Uses(StorageWeakRef(storage))
            if storage._cdata in self._written:
                writer, time = self._written[storage._cdata]
                uses.writes[writer] = time
        home = self._home(tensor)
        if stream is not self.side and home not in (None, stream, self.side):
            self._fail(f"memory of the stream {home.name!r} used on {stream.name!r}")
        earlier = [("written", uses.writes)] + ([("read", uses.reads)] if writes else [])
        for what, times in earlier:
            for other, time in times.items():
                if other is not stream and time > stream.knows.get(other, 0):
                    doing = "writes" if writes else "reads"
                    self._fail(f"{stream.name} {doing} what may still be {what} on {other.name}")
        (uses.writes if writes else uses.reads)[stream] = stream.length

    def _made(self, memory: torch.Tensor, home: Stream | None) -> torch.Tensor:
        storage = memory.untyped_storage()
        with self._lock, self._copying():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
            self._homes[storage._cdata] = StorageWeakRef(storage), home
            self._uses.pop(storage._cdata, None)
            self._written.pop(storage._cdata, None)
        return memory

    def _home(self, tensor: torch.Tensor) -> Stream | None:
        """The stream that memory was made on, None if it is pinned host memory; the model's own is not tracked."""
        reference, home = self._homes.get(tensor.untyped_storage()._cdata, (None, self.computing))
        return self.computing if reference is None or reference.expired() else home

    def _remember(self, tensor: torch.Tensor) -> Memory:
        # Pinned memory is not handed out again before the copies that use it are done, and what was made on the side
        # stream only to what comes later there.
        kept = tensor if self._home(tensor) in (None, self.side) else None
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return Memory(StorageWeakRef(tensor.untyped_storage()), kept, tensor.dtype, place)

    @contextlib.contextmanager
    def _copying(self):
        before, self._local.is_copying = getattr(self._local, "is_copying", False), True
        try:
            yield
        finally:
            self._local.is_copying = before

    def _fail(self, what: str) -> None:
        self.hazards.append(what)
        raise HazardError(what)
