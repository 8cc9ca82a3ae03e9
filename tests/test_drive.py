"""How a drive is read: what the test of the folder finds, and how far ahead layers are fetched."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from nvme_cache import OffloadedNVMeCache, arguments, cgroup, drive, io
from nvme_cache.cgroup import MemoryLimit
from nvme_cache.drive import TEST_BYTES, Drive
from nvme_cache.fetch import Resident, split
from nvme_cache.quantization import Quantized
from nvme_cache.shards import Shard
from nvme_cache.threads import takes_all_cores
from nvme_cache.transfer import HostTransfer, accelerator

MIB = 1 << 20


@pytest.fixture
def untested(monkeypatch):
    """As in a process that has not tested any drive yet."""
    monkeypatch.setattr(drive, "_tested", {})
    return drive._tested


@pytest.mark.parametrize(
    ("rate", "layer_mib", "depth"), [(3e9, 1, 4), (3e9, 8, 4), (3e9, 12, 2), (3e9, 64, 2), (14e9, 40, 3), (1e8, 1, 2)]
)
def test_ten_milliseconds_of_reads_are_under_way_with_two_to_four_layers(rate, layer_mib, depth):
    assert Drive(rate).prefetch_depth(layer_mib * MIB) == depth


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_layer_without_bytes_asks_for_the_most(tokens):
    assert Drive().prefetch_depth(tokens) == 4


@pytest.mark.parametrize(("is_shared", "threads", "rate"), [(False, 4, 4e9), (True, 2, 1e9)])
def test_more_threads_where_they_read_faster(is_shared, threads, rate, tmp_path, untested, monkeypatch):
    channel = threading.Lock()

    def read(descriptor, views, offset):
        if is_shared:
            with channel:
                time.sleep(views[0].nbytes / 1e9)
        else:
            time.sleep(views[0].nbytes / 1e9)

    monkeypatch.setattr(io, "read_all", read)
    found = drive.drive_of(tmp_path)
    assert found.io_threads == threads
    assert found.read_bytes_per_s == pytest.approx(rate, rel=0.4)


def test_each_drive_is_tested_once_and_nothing_is_left(offload_dir, untested, monkeypatch):
    written = []
    preallocate = io.preallocate
    monkeypatch.setattr(io, "preallocate", lambda *args: (written.append(args[1]), preallocate(*args)))
    for _ in range(2):
        with OffloadedNVMeCache(offload_dir=offload_dir) as cache:
            assert [path.name for path in cache.offload_path.iterdir()] == ["lock"]
            assert list(untested.values()) == [cache._pager._store.drive]
    assert written == [TEST_BYTES]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")])
def test_a_drive_that_cannot_be_tested_is_taken_for_a_common_one(error, offload_dir, untested, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(io, "preallocate", fail)
    with OffloadedNVMeCache(offload_dir=offload_dir) as cache:
        assert cache._pager._store.drive == Drive()
        assert [path.name for path in cache.offload_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("budget", [0, TEST_BYTES - 1])
def test_the_test_keeps_to_the_disk_budget(budget, offload_dir, untested):
    with OffloadedNVMeCache(offload_dir=offload_dir, disk_budget=budget) as cache:
        assert cache._pager._store.drive == Drive()
    assert untested == {}


def test_where_reads_go_through_the_page_cache_there_is_no_test(offload_dir, untested, monkeypatch):
    monkeypatch.setattr("nvme_cache.io.supports_direct", lambda folder: False)
    with OffloadedNVMeCache(offload_dir=offload_dir) as cache:
        assert cache._pager._store.drive == Drive()
    assert untested == {}


def test_direct_io_that_is_taken_and_then_cached_does_not_count(tmp_path, monkeypatch):
    if not io.supports_direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    open_as_asked = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: open_as_asked(path, flags & ~os.O_DIRECT, mode))
    assert not io.supports_direct(tmp_path)


@pytest.mark.parametrize(("options", "threads"), [({}, 3), ({"io_threads": 7}, 7)])
def test_threads_are_as_tested_unless_told_otherwise(options, threads, make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.store.drive_of", lambda folder: Drive(io_threads=3))
    for all_cores, quantization, per_read in ((False, None, 2), (True, "int8", 2), (True, None, 1)):
        monkeypatch.setattr("nvme_cache.pager.takes_all_cores", lambda all_cores=all_cores: all_cores)
        pager = make_cache(quantization=quantization, **options)._pager
        assert pager._turns._value == threads
        assert pager._readers._max_workers == per_read * threads  # as many again where they check or decode


@pytest.mark.parametrize("cores", [1, 64])
def test_a_model_on_the_host_may_leave_cores_to_others(cores, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert takes_all_cores() == (torch.get_num_threads() >= cores and accelerator() is None)


def test_background_threads_compute_without_help_and_nobody_else_has_to(make_cache):
    pager, threads = make_cache(block_size=16)._pager, torch.get_num_threads()
    for executor in (pager._readers, pager._writer._executor):
        assert executor.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(torch.get_num_threads).result() == threads == torch.get_num_threads()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_threads_share_what_is_to_be_copied(count):
    pieces = [Resident((torch.empty(nbytes, dtype=torch.uint8),), None) for nbytes in (6, 2, 2, 4, 2)]
    groups = split(pieces, count)
    assert [piece for group in groups for piece in group] == pieces
    assert [sum(piece.nbytes for piece in group) for group in groups] == {
        1: [16], 2: [8, 8], 3: [6, 8, 2], 8: [6, 2, 2, 4, 2]
    }[count]  # fmt: skip


@pytest.mark.parametrize(("options", "tokens", "depth"), [({}, 64, 4), ({}, 2048, 2), ({"prefetch_depth": 3}, 2048, 3)])
def test_small_layers_are_fetched_further_ahead(options, tokens, depth, make_cache, monkeypatch):
    """By the assumed rate 30 MB are under way: four layers of 64 tokens, two of 2,048, which are 16 MiB."""
    monkeypatch.setattr("nvme_cache.store.drive_of", lambda folder: Drive())
    cache = make_cache(**({"block_size": 16, "prefetch_depth": "auto"} | options))
    states = torch.zeros(2, 1, 8, tokens, 128)
    for layer_idx in range(8):
        cache.update(*states, layer_idx)
    with torch.no_grad():
        for layer_idx in range(8):
            cache.update(*torch.zeros(2, 1, 8, 1, 128), layer_idx)
            ahead = [(layer_idx + step) % 8 for step in range(1, 8)]
            fetched = [
                cache.layers[index]._lease is not None and cache.layers[index]._lease.is_valid for index in ahead
            ]
            assert fetched == [True] * depth + [False] * (7 - depth)
    [lane] = cache._pager._lanes.values()
    assert len(lane.slots._slots) == depth + 1


@pytest.mark.parametrize(("limit", "used", "budget"), [(8 << 30, 6 << 30, 1 << 30), (1 << 60, 0, None), (5, 9, 0)])
def test_half_of_what_the_container_has_left_is_the_default_host_budget(limit, used, budget, monkeypatch):
    monkeypatch.setattr(cgroup, "memory_limit", lambda: MemoryLimit(limit, used))
    free = psutil.virtual_memory().available
    assert arguments.parse_host_budget("auto") == pytest.approx(free / 2 if budget is None else budget, rel=0.1)


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    assert cgroup.memory_limit(tmp_path) is cgroup.cpu_quota(tmp_path) is None


@pytest.mark.parametrize("nbytes", [1, 4097, 2 * MIB, 5 * MIB + 1])
def test_host_memory_fills_whole_huge_pages(nbytes):
    memory = HostTransfer().host_memory(nbytes)
    assert nbytes <= memory.numel() < nbytes + 4096
    assert memory.data_ptr() % (2 * MIB if nbytes >= 2 * MIB else 4096) == 0


def test_one_thread_reads_while_another_decodes_and_no_more_than_asked_for_read(make_cache, monkeypatch):
    begun, under_way, most, met = [], set(), [], []
    read, decode = Shard.read, Quantized.decode

    def counted(shard, *args):
        begun.append(shard)
        under_way.add(shard)
        most.append(len(under_way))
        time.sleep(0.005)
        under_way.discard(shard)
        return read(shard, *args)

    def slow(*args):
        before, until = len(begun), time.monotonic() + 0.2
        while len(begun) == before and time.monotonic() < until:
            time.sleep(0.001)
        met.append(len(begun) > before)
        return decode(*args)

    monkeypatch.setattr(Shard, "read", counted)
    monkeypatch.setattr(Quantized, "decode", slow)
    cache = make_cache(block_size=16, quantization="int8", io_threads=1)
    with torch.no_grad():
        for length in (68, 1, 1):
            for layer_idx in range(8):
                cache.update(*torch.randn(2, 1, 2, length, 16), layer_idx)
    assert any(met)
    assert max(most) == 1
