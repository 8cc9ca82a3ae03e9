"""The machinery that moves blocks between tiers: sealing, writing, fetching.

One pager serves one cache. It knows runs, slots and shards, but nothing of transformers.
"""

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from . import fetch
from .blocks import BlockRun
from .buffers import StagingPool
from .errors import CacheClosedError, CacheMisuseError, NVMeCacheError
from .meter import Cause, Meter, split
from .placement import Budgets, Tier, place
from .quantization import QuantizationConfig
from .seal import Lane, Sealer
from .shards import MAX_SECTION_BYTES
from .slots import Check, Lease, SlotPool
from .spill import Writer
from .states import LayerSpec, States
from .store import Store
from .threads import PREFIX, pool, takes_all_cores
from .transfer import Timestamp, transfer_for

_SEGMENTS_BYTES = 40 << 20  # laid out at a time
_THREADS_PER_READ = 2  # one reads while the other checks or decodes


class BlockOwner(Protocol):
    """A layer, as the pager sees it."""

    layer_idx: int

    def used_bytes(self) -> Counter[Tier]:
        """Bytes of its sealed blocks by tier."""


class Pager:
    """Seals tokens into blocks, keeps them in their tiers, brings them back into slots.

    Args:
        store: Where shards go; closed with the pager.
        budgets: What may stay in device and host memory.
        num_layers: How many layers share the budgets.
        block_size: Tokens in a block.
        prefetch_depth: Layers to fetch ahead; None for what suits the drive and the size of a layer. A device has one
            slot more than that.
        io_threads: Reads under way at once; None for what suits the drive.
        quantization: How blocks are stored; None for as they are.
        verify: Whether every block read back is checked against its checksum.
    """

    def __init__(
        self,
        store: Store,
        *,
        budgets: Budgets,
        num_layers: int,
        block_size: int,
        prefetch_depth: int | None,
        io_threads: int | None,
        quantization: QuantizationConfig | None,
        verify: bool,
    ) -> None:
        self.num_layers = num_layers
        self.meter = Meter()
        self._users: weakref.WeakSet[BlockOwner] = weakref.WeakSet()
        self._store = store
        self._budgets = budgets
        self._prefetch_depth = prefetch_depth
        self._io_threads = store.drive.io_threads if io_threads is None else io_threads
        self._verify = verify
        self._pid = os.getpid()
        self._lanes: dict[torch.device, Lane] = {}
        self._turns = threading.Semaphore(self._io_threads)
        self._checks_late = takes_all_cores()
        # A thread that does nothing but read needs no second one to take over, which would have to be woken first.
        self._readers = pool(
            self._io_threads * (1 if self._checks_late and quantization is None else _THREADS_PER_READ), "read"
        )
        self._copiers, write_thread = pool(self._io_threads, "copy"), pool(1, "write")
        self._writer = Writer(write_thread, self.meter)
        self._sealer = Sealer(store, self._writer, self.meter, block_size, quantization)
        fillers = self._readers, self._copiers
        self._finalizer = weakref.finalize(self, _shut_down, fillers, write_thread, self._lanes, store, self._pid)

    @property
    def folder(self) -> Path:
        """Where this cache's shards are."""
        return self._store.path

    @property
    def store(self) -> Store:
        """What keeps that folder."""
        return self._store

    def check(self) -> None:
        """Raises what went wrong in the background since the last call, once, and tries those writes again.

        Raises:
            CacheClosedError: the cache was closed.
            CacheMisuseError: this is a forked child of the process that made the cache.
            StorageFullError: the drive was full.
            ShardIOError: the drive refused a write.
        """
        if not self._finalizer.alive:
            raise CacheClosedError("this cache was closed and its shards deleted; make a new one")
        if os.getpid() != self._pid:
            raise CacheMisuseError(
                f"this cache belongs to process {self._pid}; a forked child has none of its threads. Make a new cache "
                "in the child, or start workers with the spawn method."
            )
        if self._writer.has_failed:
            self.delete_free_files()  # before the writes are tried again: the drive may be full
        self._writer.check()

    def delete_free_files(self) -> None:
        """Gives back what the shards of dropped tokens took on the drive, kept to be overwritten until now."""
        self._store.delete_free_files()

    def flush(self) -> None:
        """Waits until every write and every read so far is done, well or not."""
        if self._finalizer.alive and os.getpid() == self._pid:
            self._writer.flush()
            for lane in self._lanes.values():
                lane.slots.wait()
                lane.segment_slots.wait()

    def close(self) -> None:
        """Waits for work in flight, then deletes the shards. Safe to call again."""
        self._finalizer()

    def fork(self) -> "Pager":
        """A pager with the same settings and the same store, for a cache that shares this one's runs.

        Raises:
            NVMeCacheError: as `check`; every write under way is finished first.
        """
        self.flush()
        self.check()
        return Pager(
            self._store.share(),
            budgets=self._budgets,
            num_layers=self.num_layers,
            block_size=self.block_size,
            prefetch_depth=self._prefetch_depth,
            io_threads=self._io_threads,
            quantization=self.quantization,
            verify=self._verify,
        )

    def register(self, owner: "BlockOwner") -> None:
        """Counts the blocks of `owner` against the budgets for as long as it exists."""
        self._users.add(owner)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._sealer.block_size

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How blocks are stored; None for as they are."""
        return self._sealer.quantization

    @property
    def is_exact(self) -> bool:
        """Whether blocks give back what was sealed, bit for bit."""
        return self.quantization is None

    @property
    def tail_capacity(self) -> int:
        """Most tokens a tail has to hold, but for sinks that are due."""
        # One update short of a block may join what is one token short of another.
        return 2 * self.block_size

    @property
    def longest_tail(self) -> int:
        """Most tokens a tail may hold, sinks that are due among them."""
        return self.tail_capacity + self._sealer.sinks_due(0)

    def sealable(self, first_token: int, count: int) -> int:
        """How many of `count` tokens, the first of them at `first_token`, `seal` takes."""
        sinks = self._sealer.sinks_due(first_token)
        whole = (count - sinks) // self.block_size * self.block_size
        return sinks + whole if whole > 0 else 0

    def seal(
        self, owner: "BlockOwner", spec: LayerSpec, states: Sequence[States], *, first_token: int
    ) -> list[BlockRun]:
        """Turns tokens into blocks and sends them to their tiers, as `Sealer.seal`.

        Args:
            owner: The layer.
            spec: The layer's heads and widths, and the dtypes to seal in.
            states: As many consecutive tokens as are `sealable`.
            first_token: Position of the first token.
        """

        def by_plan(num_blocks: int, block_bytes: int) -> dict[Tier, int]:
            used = sum((user.used_bytes() for user in self._users), Counter[Tier]())
            return place(num_blocks, block_bytes, self._budgets, self.num_layers, owner.used_bytes(), used)

        return self._sealer.seal(
            self._lane(states[0][0].device),
            spec,
            states,
            layer_idx=owner.layer_idx,
            first_token=first_token,
            place=by_plan,
        )

    @property
    def host_bytes_of_a_layer(self) -> int:
        """What each layer may keep in host memory."""
        return self._budgets.host_bytes // self.num_layers

    def prefetch_depth(self, layer_bytes: int) -> int:
        """How many layers of `layer_bytes` to fetch ahead."""
        if self._prefetch_depth is None:
            return self._store.drive.prefetch_depth(layer_bytes, is_exact=self.is_exact)
        return self._prefetch_depth

    def segments_ahead(self, stored_bytes: int, laid_out_bytes: int) -> int:
        """How many segments to fetch ahead; unless told, no more than fit in the memory there is for all of them."""
        depth = self.prefetch_depth(stored_bytes)
        return depth if self._prefetch_depth is not None else max(1, min(depth, _SEGMENTS_BYTES // laid_out_bytes - 1))

    def timestamp(self, device: torch.device) -> Timestamp:
        """How far the model's computation on `device` has got."""
        return self._lane(device).transfer.timestamp()

    def fetch(
        self,
        device: torch.device,
        spec: LayerSpec,
        batch_size: int,
        runs: Sequence[BlockRun],
        *,
        capacity: int,
        keep: Lease | None,
        steal: bool,
        ahead: int | None = None,
        in_parts: bool = True,
    ) -> Lease | None:
        """Starts laying a layer's runs out in a slot.

        Args:
            device: Where the slot is.
            spec: The layer's present heads, widths and dtypes.
            batch_size: The layer's present batch rows.
            runs: What to lay out, from the first token on.
            capacity: Tokens to leave room for, at least.
            keep: A lease whose slot must stay as it is.
            steal: Whether to take a slot from a layer it is being filled for ahead.
            ahead: If this is a segment, how many are fetched ahead; segments have slots of their own size.
            in_parts: Whether several threads read what is large, so that the drive always has the next part to read;
                one thread's long reads cost the processor less.

        Returns:
            The lease, whose slot's tasks are under way; None if no slot is to be had.
        """
        lane = self._lane(device)
        num_slots = 1 + (self.prefetch_depth(sum(run.nbytes for run in runs)) if ahead is None else ahead)
        slots = lane.slots if ahead is None else lane.segment_slots
        slot = slots.acquire(keep.slot if keep else None, num_slots, steal=steal)
        if slot is None:
            return None
        slot.lay_out(spec, batch_size, capacity)
        threads = self._io_threads if in_parts else 1
        reads, residents = fetch.plan(slot, runs, in_parts=threads > 1)
        read_bytes = sum(read.nbytes for read in reads)  # tasks empty what they are given
        after = lane.transfer.mark()
        checks: list[Check] = []
        later = checks if self._checks_late else None
        try:
            for copies in fetch.split(residents, threads):
                slot.tasks.append(self._copiers.submit(lane.filler.copy, copies, after))
            for group in fetch.split(reads, threads):
                slot.tasks.append(self._readers.submit(lane.filler.read, group, after, later))
        except BaseException:
            slot.abandon()
            raise
        self.meter.read_bytes += read_bytes
        self.meter.copied_bytes += sum(resident.nbytes for resident in residents)
        return Lease(slot, slot.tenancy, slots, checks)

    def wait(self, lease: Lease, device: torch.device) -> bool:
        """Waits until the leased slot is filled; computation on the device is made to wait for the last copies.

        Returns:
            False if a shard had not been written and now may have been: the lease is over, fetch again.

        Raises:
            NVMeCacheError: what went wrong while filling it; the lease is over.
        """
        slot = lease.slot
        began_s = time.perf_counter()
        errors = [error for task in slot.tasks if (error := task.exception()) is not None]
        ended_s = time.perf_counter()
        if lease.checks and not errors:
            try:
                while lease.checks:
                    lease.checks[-1]()
                    lease.checks.pop()  # not before: whoever is interrupted asks again
            except NVMeCacheError as error:
                errors.append(error)
            self.meter.waited({Cause.CHECK: time.perf_counter() - ended_s})
        if errors:
            slot.abandon()
            self.check()  # raises why a write failed, unless it has been said before
            if isinstance(errors[0], fetch.NotWrittenError):
                return False
            raise errors[0]
        lane = self._lane(device)
        filled: list[fetch.Filled] = [task.result() for task in slot.tasks]
        for part in filled:
            lane.transfer.wait(part.event)
        slot.tasks = []
        last = max(filled, key=lambda part: part.ended_s, default=None)
        if last is not None and last.ended_s > began_s:
            self.meter.waited(split(began_s, ended_s, tuple(last.phases)))
        lease.pool.trim(slot)
        return True

    def wait_for_sealed(self, device: torch.device) -> None:
        """Makes computation on the device wait until what has been sealed there is in place."""
        lane = self._lane(device)
        lane.transfer.wait(lane.packed)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            transfer = transfer_for(device)
            staging = StagingPool(_THREADS_PER_READ * self._io_threads + 2, MAX_SECTION_BYTES, transfer)
            filler = fetch.Filler(transfer, staging, self.meter, self._turns, self._verify)
            slots, segment_slots = SlotPool(transfer), SlotPool(transfer)
            self._lanes[device] = Lane(transfer, slots, segment_slots, staging, filler, packed=transfer.record())
        return self._lanes[device]


def _shut_down(
    fillers: Sequence[ThreadPoolExecutor],
    writer: ThreadPoolExecutor,
    lanes: dict[torch.device, Lane],
    store: Store,
    owner_pid: int,
) -> None:
    if os.getpid() == owner_pid:
        # The collector may run this on one of the threads it would wait for.
        wait_for_threads = not threading.current_thread().name.startswith(PREFIX)
        for filler in fillers:
            filler.shutdown(wait=wait_for_threads)  # nothing is cancelled that another thread may be waiting for
        for lane in lanes.values():
            lane.transfer.record().synchronize()  # memory goes back to its allocator: no copy may still be using it
        writer.shutdown(wait=wait_for_threads, cancel_futures=True)
        lanes.clear()
    store.close()
