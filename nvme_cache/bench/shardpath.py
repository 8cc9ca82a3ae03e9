"""Our own paths to the drive: shards written and read one by one, and the cache's whole fetch path."""

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from nvme_cache.blocks import BlockRun
from nvme_cache.buffers import HostBuffer
from nvme_cache.pager import Pager
from nvme_cache.placement import Budgets, Tier
from nvme_cache.quantization import QuantizationConfig
from nvme_cache.shards import Section, Shard
from nvme_cache.slots import Lease
from nvme_cache.states import LayerSpec, StateSpec
from nvme_cache.store import Store

from .measure import Sample, timed
from .rawfile import touched_buffer
from .site import Site

_CPU = torch.device("cpu")
_STATES = StateSpec(num_heads=4, head_dim=128, dtype=torch.bfloat16)
_SPEC = LayerSpec(_STATES, _STATES)
_BLOCK_SIZE = 256
_MOST_SHARDS = 256  # open at once


class ShardFiles:
    """Shards of one size, keys and values together, in a store of their own.

    Args:
        site: Where the store makes its folder.
        request_bytes: Size of a shard's keys and values.
    """

    def __init__(self, site: Site, request_bytes: int) -> None:
        self._site = site
        self._store = Store(site.folder, None)
        self._section_bytes = request_bytes // 2
        self._threads = site.threads
        self._pool = ThreadPoolExecutor(site.threads, "bench-shard")
        self._shards: list[Shard] = []

    def writer(self, nbytes: int) -> Callable[[], Sample]:
        """What writes `nbytes` bytes as new shards, from one thread as the cache does; they are deleted afterwards."""
        buffers = self._buffers()

        def write() -> Sample:
            sample = timed(lambda: self._write(nbytes, buffers))
            self._shards.clear()
            self._store.delete_free_files()  # else the next shards would be written over them
            return sample

        return write

    def reader(self, nbytes: int) -> Callable[[], Sample]:
        """What reads `nbytes` bytes, shard by shard, unverified; each thread has shards of its own."""
        count = max(1, nbytes // self._threads // (2 * self._section_bytes))
        self._write(min(self._threads * count, _MOST_SHARDS) * 2 * self._section_bytes, self._buffers())
        parts = [self._shards[thread :: self._threads] for thread in range(self._threads)]
        buffers = [self._buffers() for _ in parts]

        def read_part(thread: int) -> int:
            views = [[buffer.view] for buffer in buffers[thread]]
            for shard in itertools.islice(itertools.cycle(parts[thread]), count):
                shard.read([*shard.sections[0], *shard.sections[1]], views)
            return count * 2 * self._section_bytes

        def read() -> Sample:
            self._site.make_cold(self._store.path)
            return timed(lambda: sum(self._pool.map(read_part, range(self._threads))))

        return read

    def _write(self, nbytes: int, buffers: list[HostBuffer]) -> int:
        for _ in range(max(1, nbytes // (2 * self._section_bytes))):
            shard = self._store.new_shard(0, 0, ((self._section("keys"),), (self._section("values"),)))
            shard.write(buffers)
            self._shards.append(shard)
        return nbytes

    def _buffers(self) -> list[HostBuffer]:
        return [touched_buffer(self._section_bytes) for _ in range(2)]

    def _section(self, name: str) -> Section:
        return Section.of(name, (1, 1, 1, self._section_bytes // 256, 128), torch.bfloat16)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._shards.clear()
        self._store.close()


class FetchPath:
    """Layers on the drive, fetched into slots in turn as a decode step would, with nothing computed in between.

    Args:
        site: Where the store makes its folder.
        layer_bytes: Keys and values of one layer, as they are in a slot.
        num_layers: Layers.
        verify: Whether what is read is checked.
        quantization: How blocks are stored; None for exactly.
    """

    def __init__(
        self,
        site: Site,
        layer_bytes: int,
        num_layers: int,
        *,
        verify: bool,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        self._site = site
        self._store = Store(site.folder, None)
        self._pager = Pager(
            self._store,
            budgets=Budgets(0, 0),
            num_layers=num_layers,
            block_size=_BLOCK_SIZE,
            prefetch_depth=None,
            io_threads=site.threads,
            quantization=quantization,
            verify=verify,
        )
        self._layer_bytes = layer_bytes
        self._tokens = layer_bytes // _SPEC.nbytes(1)
        states = torch.randn(1, _STATES.num_heads, self._tokens, _STATES.head_dim).to(_STATES.dtype)
        self._layers = [
            self._pager.seal(_Layer(layer_idx), _SPEC, [(states, states)], first_token=0)
            for layer_idx in range(num_layers)
        ]
        self._pager.flush()
        self._pager.check()
        self._sweep()  # makes the slots and faults them in

    @property
    def slot_bytes(self) -> int:
        """Memory that layers are read into, in turn."""
        return (self._pager.prefetch_depth(self._layer_bytes) + 1) * self._layer_bytes

    def __call__(self) -> Sample:
        """Fetches every layer once."""
        self._site.make_cold(self._store.path)
        return timed(self._sweep)

    def _sweep(self) -> int:
        before = self._pager.meter.read_bytes
        leases: list[Lease] = []
        waiting = iter(self._layers)
        for runs in itertools.islice(waiting, self._pager.prefetch_depth(self._layer_bytes)):
            leases.append(self._fetch(runs, keep=None))
        for number in range(len(self._layers)):
            self._pager.wait(leases[number], _CPU)
            for runs in itertools.islice(waiting, 1):
                leases.append(self._fetch(runs, keep=leases[number]))
        return self._pager.meter.read_bytes - before

    def _fetch(self, runs: list[BlockRun], keep: Lease | None) -> Lease:
        capacity = self._tokens + _BLOCK_SIZE
        lease = self._pager.fetch(_CPU, _SPEC, 1, runs, capacity=capacity, keep=keep, steal=False)
        assert lease is not None, "there is a slot for each layer under way"
        return lease

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._layers.clear()
        self._pager.close()


class _Layer:
    """A layer that keeps no count: nothing it has may stay in memory anyway."""

    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx

    def used_bytes(self) -> Counter[Tier]:
        return Counter()
