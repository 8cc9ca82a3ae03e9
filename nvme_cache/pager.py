"""The machinery that moves blocks between tiers: sealing, writing, fetching.

One pager serves one cache. It knows runs, slots and shards, but nothing of transformers.
"""

import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from . import fetch
from .blocks import BlockRun, LayerSpec, ResidentBlocks, States, cut, pack
from .buffers import StagingPool, shaped
from .errors import CacheClosedError, CacheMisuseError
from .meter import Cause, Meter, split
from .placement import Budgets, Tier, place
from .shards import MAX_SECTION_BYTES, Section, Shard
from .slots import Lease, SlotPool
from .spill import Write, Writer
from .store import Store
from .transfer import Event, Timestamp, Transfer, transfer_for

_THREAD_PREFIX = "nvme-cache"


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
        io_threads: Threads that read; None for what suits the drive.
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
        verify: bool,
    ) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.meter = Meter()
        self._users: weakref.WeakSet[BlockOwner] = weakref.WeakSet()
        self._store = store
        self._budgets = budgets
        self._prefetch_depth = prefetch_depth
        self._io_threads = store.drive.io_threads if io_threads is None else io_threads
        self._verify = verify
        self._pid = os.getpid()
        self._lanes: dict[torch.device, _Lane] = {}
        self._readers = ThreadPoolExecutor(self._io_threads, f"{_THREAD_PREFIX}-read")
        write_thread = ThreadPoolExecutor(1, f"{_THREAD_PREFIX}-write")
        self._writer = Writer(write_thread, self.meter)
        self._finalizer = weakref.finalize(self, _shut_down, self._readers, write_thread, self._lanes, store, self._pid)

    @property
    def folder(self) -> Path:
        """Where this cache's shards are."""
        return self._store.path

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
            verify=self._verify,
        )

    def register(self, owner: "BlockOwner") -> None:
        """Counts the blocks of `owner` against the budgets for as long as it exists."""
        self._users.add(owner)

    def seal(
        self, owner: "BlockOwner", spec: LayerSpec, states: Sequence[States], *, first_token: int
    ) -> list[BlockRun]:
        """Turns tokens into blocks and sends them to their tiers. Waits only for staging buffers.

        Args:
            owner: The layer.
            spec: The layer's heads and widths, and the dtypes to seal in.
            states: Consecutive keys and values, `[batch, heads, seq_length, head_dim]` each, of whole blocks' worth of
                tokens together. Their memory must not be written to again.
            first_token: Position of the first token.

        Returns:
            The new runs, in token order.

        Raises:
            StorageFullError: there is no room; nothing was sealed.
        """
        transfer = self._lane(states[0][0].device).transfer
        batch_size = states[0][0].shape[0]
        num_blocks = sum(keys.shape[2] for keys, _ in states) // self.block_size
        block_bytes = spec.nbytes(self.block_size) * batch_size
        used = sum((user.used_bytes() for user in self._users), Counter[Tier]())
        counts = place(num_blocks, block_bytes, self._budgets, self.num_layers, owner.used_bytes(), used)
        section_bytes = max(spec.keys.nbytes(self.block_size), spec.values.nbytes(self.block_size)) * batch_size
        limit = max(1, MAX_SECTION_BYTES // section_bytes)
        runs: list[BlockRun] = []
        start = 0
        for tier, count in counts.items():
            while count:
                size = count if tier is Tier.DEVICE else min(count, limit)
                if tier is Tier.HOST:  # pinned memory comes in powers of two
                    size = 1 << (size.bit_length() - 1)
                part = cut(states, start * self.block_size, size * self.block_size)
                pieces = 1 if transfer.is_host else size
                shapes = tuple(
                    (pieces, batch_size, kind.num_heads, size // pieces * self.block_size, kind.head_dim)
                    for kind in (spec.keys, spec.values)
                )
                blocks: ResidentBlocks | Shard
                if tier is Tier.NVME:
                    blocks = self._spill(owner.layer_idx, first_token + start * self.block_size, spec, shapes, part)
                else:
                    blocks = self._keep(tier, spec, shapes, part)
                length = size * self.block_size
                runs.append(BlockRun(tier, blocks, spec, batch_size, sealed_length=length, length=length))
                start, count = start + size, count - size
        self.meter.sealed_bytes += sum(run.nbytes for run in runs)
        return runs

    def prefetch_depth(self, layer_bytes: int) -> int:
        """How many layers of `layer_bytes` to fetch ahead."""
        if self._prefetch_depth is None:
            return self._store.drive.prefetch_depth(layer_bytes)
        return self._prefetch_depth

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

        Returns:
            The lease, whose slot's tasks are under way; None if no slot is to be had.
        """
        lane = self._lane(device)
        num_slots = self.prefetch_depth(spec.nbytes(capacity) * batch_size) + 1
        slot = lane.slots.acquire(keep.slot if keep else None, num_slots, steal=steal)
        if slot is None:
            return None
        slot.lay_out(spec, batch_size, capacity)
        reads, residents = fetch.plan(slot, runs)
        read_bytes = sum(read.nbytes for read in reads)  # tasks empty what they are given
        after = lane.transfer.mark()
        try:
            if residents:
                slot.tasks.append(self._readers.submit(lane.filler.copy, residents, after))
            for group in fetch.split(reads, self._io_threads):
                slot.tasks.append(self._readers.submit(lane.filler.read, group, after))
        except BaseException:
            slot.abandon()
            raise
        self.meter.read_bytes += read_bytes
        self.meter.copied_bytes += sum(resident.blocks.nbytes for resident in residents)
        return Lease(slot, slot.tenancy)

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
        lane.slots.trim(slot)
        return True

    def _lane(self, device: torch.device) -> "_Lane":
        if device not in self._lanes:
            transfer = transfer_for(device)
            staging = StagingPool(self._io_threads + 2, MAX_SECTION_BYTES, transfer)
            filler = fetch.Filler(transfer, staging, self.meter, self._verify)
            self._lanes[device] = _Lane(transfer, SlotPool(transfer), staging, filler, packed=transfer.record())
        return self._lanes[device]

    def _spill(
        self, layer_idx: int, first_token: int, spec: LayerSpec, shapes: Sequence[tuple[int, ...]], states: list[States]
    ) -> Shard:
        keys = Section.of("keys", shapes[0], spec.keys.dtype)
        values = Section.of("values", shapes[1], spec.values.dtype)
        shard = self._store.new_shard(layer_idx, first_token, (keys, values))
        staging = self._lane(states[0][0].device).staging
        began_s = time.perf_counter()
        buffers = [staging.acquire(section.padded_nbytes) for section in shard.sections]
        self.meter.waited({Cause.STAGING: time.perf_counter() - began_s})
        targets = [
            shaped(buffer.bytes, section.shape, section.dtype)
            for buffer, section in zip(buffers, shard.sections, strict=True)
        ]
        self._writer.submit(Write(shard, staging, buffers, states, self._pack(targets, states)))
        return shard

    def _keep(
        self, tier: Tier, spec: LayerSpec, shapes: Sequence[tuple[int, ...]], states: list[States]
    ) -> ResidentBlocks:
        transfer = self._lane(states[0][0].device).transfer
        make = transfer.device_memory if tier is Tier.DEVICE else transfer.host_memory
        targets = [
            shaped(make(kind.dtype.itemsize * math.prod(shape)), shape, kind.dtype)
            for shape, kind in zip(shapes, (spec.keys, spec.values), strict=True)
        ]
        event = self._pack(targets, states)
        if not transfer.is_host:
            self._writer.hold(event, states, targets)
        return ResidentBlocks(*targets)

    def _pack(self, targets: Sequence[torch.Tensor], states: Sequence[States]) -> Event:
        lane = self._lane(states[0][0].device)
        # What was packed before came from memory that the model may soon write to again, if a graph replays it.
        lane.transfer.wait(lane.packed)
        with lane.transfer.side_stream(lane.transfer.mark()):
            for index, target in enumerate(targets):
                near, at = lane.transfer.on_device(target), 0
                for part in states:
                    for block_view, token_view in pack(near, at, part[index]):
                        lane.transfer.copy(block_view, token_view)
                    at += part[index].shape[2]
                if near is not target:
                    lane.transfer.copy(target, near)
        lane.packed = lane.transfer.record()
        return lane.packed


@dataclass(slots=True)
class _Lane:
    """What one device needs to move blocks; `packed` is behind the last tokens sealed."""

    transfer: Transfer
    slots: SlotPool
    staging: StagingPool
    filler: fetch.Filler
    packed: Event


def _shut_down(
    readers: ThreadPoolExecutor,
    writer: ThreadPoolExecutor,
    lanes: dict[torch.device, _Lane],
    store: Store,
    owner_pid: int,
) -> None:
    if os.getpid() == owner_pid:
        # The collector may run this on one of the threads it would wait for.
        wait_for_threads = not threading.current_thread().name.startswith(_THREAD_PREFIX)
        readers.shutdown(wait=wait_for_threads)  # nothing is cancelled that another thread may be waiting for
        for lane in lanes.values():
            lane.transfer.record().synchronize()  # memory goes back to its allocator: no copy may still be using it
        writer.shutdown(wait=wait_for_threads, cancel_futures=True)
        lanes.clear()
    store.close()
