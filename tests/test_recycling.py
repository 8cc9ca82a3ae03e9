"""Files of dropped tokens, overwritten by new ones: none that anyone may still read, none beyond a budget."""

import copy
import errno
import gc
import os
import shutil
import signal
import stat
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nvme_cache import OffloadedNVMeCache, ShardIOError, StorageFullError, io, store
from nvme_cache.bench.rawfile import touched_buffer
from nvme_cache.shards import Section
from nvme_cache.store import Store

from .test_store import start

LAYERS = 3


def fill(cache, tokens=64):
    """Gives every layer a prompt, each when the one before is on the drive, and returns it."""
    states = torch.randn(LAYERS, 2, 1, 2, tokens, 16)
    for layer_idx in range(LAYERS):
        cache.update(*states[layer_idx], layer_idx)
        cache._pager.flush()
    return states


def reset(cache):
    cache._pager.flush()  # a read under way holds its shard
    cache.reset()


def assert_holds(cache, states):
    """Every layer's sealed tokens, read back from the drive and checked against their checksums, and its tail."""
    for layer_idx in range(LAYERS):
        cache.layers[layer_idx]._abandon_slot()
        held = cache.layers[layer_idx].keys, cache.layers[layer_idx].values
        assert all(map(torch.equal, held, states[layer_idx]))


def files(cache, suffix):
    return sorted(cache.offload_path.glob(f"*.{suffix}"))


def inodes(paths):
    return {path.stat().st_ino for path in paths}


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("layer-*"))


@pytest.fixture
def held_open():
    """Opens files for the length of a test: what it finds under a number is then the file that had it before."""
    descriptors = []

    def hold(paths):
        descriptors.extend(os.open(path, os.O_RDONLY) for path in paths)
        return {os.fstat(descriptor).st_ino for descriptor in descriptors}

    yield hold
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def small_store(offload_dir):
    made = Store(offload_dir, None)
    yield made
    made.close()
    assert list(offload_dir.iterdir()) == []


def new_shard(small_store, pages=1):
    shape = (1, 1, 1, pages * 16, 64)
    return small_store.new_shard(0, 0, tuple((Section.of(name, shape, torch.float32),) for name in ("keys", "values")))


def write(shard):
    shard.write([touched_buffer(section.padded_nbytes) for (section,) in shard.sections])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("allowance", [4096, 0])  # shards kept open, and opened for every read
def test_the_next_prompt_is_written_over_the_files_of_the_last(direct, allowance, make_cache, held_open, monkeypatch):
    monkeypatch.setattr("nvme_cache.io.open_file_allowance", lambda: allowance)
    if not direct:
        monkeypatch.setattr("nvme_cache.io.supports_direct", lambda folder: False)
    cache = make_cache(block_size=16)
    fill(cache)
    before = held_open(files(cache, "safetensors"))
    assert len(before) == LAYERS
    reset(cache)
    assert files(cache, "safetensors") == []
    assert inodes(files(cache, "free")) == before
    states = fill(cache)
    assert inodes(files(cache, "safetensors")) == before
    assert files(cache, "free") == files(cache, "partial") == []
    assert_holds(cache, states)
    for layer_idx, path in enumerate(files(cache, "safetensors")):
        assert torch.equal(load_file(path)["keys"].squeeze(0), states[layer_idx][0])


def test_shards_of_another_size_are_not_written_over_those_files(make_cache, held_open):
    cache = make_cache(block_size=16)
    fill(cache, tokens=128)
    reset(cache)
    before = held_open(files(cache, "free"))
    free = {path: path.read_bytes() for path in files(cache, "free")}
    states = fill(cache, tokens=64)
    left = files(cache, "free")  # the others made room for new ones
    assert left and {path: path.read_bytes() for path in left}.items() <= free.items()
    assert not inodes(files(cache, "safetensors")) & before
    assert_holds(cache, states)


def test_a_file_whose_size_was_changed_is_not_recycled(make_cache, held_open):
    cache = make_cache(block_size=16)
    fill(cache)
    before = held_open(files(cache, "safetensors"))
    reset(cache)
    for path, size in zip(files(cache, "free"), (0, 4096, 1 << 20), strict=True):
        os.truncate(path, size)
    states = fill(cache)
    assert not inodes(files(cache, "safetensors")) & before
    assert files(cache, "free") == []
    assert_holds(cache, states)


def test_a_file_that_is_gone_is_not_missed(make_cache):
    cache = make_cache(block_size=16)
    fill(cache)
    reset(cache)
    for path in files(cache, "free"):
        path.unlink()
    assert_holds(cache, fill(cache))


def test_a_file_with_another_link_keeps_its_bytes(make_cache, tmp_path):
    cache = make_cache(block_size=16)
    fill(cache)
    for path in files(cache, "safetensors"):
        os.link(path, tmp_path / path.name)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    reset(cache)
    states = fill(cache)
    assert len(kept) == LAYERS
    assert kept == {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    assert not inodes(kept) & inodes(files(cache, "safetensors"))
    assert files(cache, "free") == []
    assert_holds(cache, states)


def test_what_the_next_prompt_had_no_use_for_goes_with_the_reset_after_it(make_cache):
    cache = make_cache(block_size=16)
    fill(cache, tokens=128)
    reset(cache)
    fill(cache, tokens=64)
    used = inodes(files(cache, "safetensors"))
    assert files(cache, "free")
    reset(cache)
    assert inodes(files(cache, "free")) == used
    reset(cache)
    assert files(cache, "free") == []


@pytest.mark.parametrize("budgeted", [True, False])
def test_the_folder_never_takes_more_than_shards_once_did(budgeted, make_cache, monkeypatch):
    """To the byte, whatever the sizes and however often they change."""
    most = LAYERS * (4096 + 2 * 128 * 2 * 16 * 4)
    cache = make_cache(block_size=16, disk_budget=most if budgeted else None)
    fill(cache, tokens=128)
    assert folder_bytes(cache.offload_path) == most
    seen = []
    write_all = io.write_all

    def watched(*arguments):
        seen.append(folder_bytes(cache.offload_path))
        write_all(*arguments)

    monkeypatch.setattr(io, "write_all", watched)
    for tokens in (64, 96, 16, 128, 112, 128):
        reset(cache)
        assert_holds(cache, fill(cache, tokens))
    assert len(seen) == 6 * LAYERS
    assert max(seen) == most
    assert cache._pager._store.used_bytes == most
    if budgeted:
        with pytest.raises(StorageFullError, match=rf"disk_budget={most:,} with {most:,} in use"):
            cache.update(*torch.randn(2, 1, 2, 16, 16), 0)


def test_used_bytes_are_those_of_live_shards(small_store):
    shards = [new_shard(small_store) for _ in range(3)]
    for shard in shards:
        write(shard)
    assert small_store.used_bytes == 3 * 3 * 4096
    del shard, shards[1:]
    assert small_store.used_bytes == 3 * 4096
    assert folder_bytes(small_store.path) == 3 * 3 * 4096
    small_store.delete_free_files()
    assert folder_bytes(small_store.path) == small_store.used_bytes == 3 * 4096


def test_files_of_sizes_no_longer_asked_for_go_first(small_store):
    shards = [new_shard(small_store, pages) for pages in (2, 2, 2, 1, 1, 1)]
    for shard in shards:
        write(shard)
    del shard, shards
    kept = [new_shard(small_store, pages=2), new_shard(small_store, pages=3)]
    assert sorted(path.stat().st_size for path in small_store.path.glob("*.free")) == [5 * 4096, 5 * 4096]
    del kept


def test_free_files_make_way_where_the_drive_is_full(make_cache, monkeypatch):
    cache = make_cache(block_size=16)
    fill(cache, tokens=128)
    reset(cache)
    drive_bytes = (64 << 20) + folder_bytes(cache.offload_path) - 10000  # which someone else has taken

    def disk_usage(folder):
        return shutil._ntuple_diskusage(drive_bytes, 0, drive_bytes - folder_bytes(folder))

    monkeypatch.setattr("nvme_cache.store.shutil.disk_usage", disk_usage)
    assert_holds(cache, fill(cache, tokens=96))
    assert files(cache, "free") == []
    with pytest.raises(StorageFullError, match="bytes free; a shard of"):
        fill(cache, tokens=128)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_half_way_over_a_file_loses_nothing(number, make_cache, held_open, monkeypatch):
    cache = make_cache(block_size=16)
    fill(cache)
    before = held_open(files(cache, "safetensors"))
    reset(cache)
    fill(cache, tokens=16)  # the files wait for shards as large as they are
    states = torch.randn(LAYERS, 2, 1, 2, 64, 16)
    written, pwritev = [], os.pwritev

    def fail(descriptor, views, offset):
        if written:
            raise OSError(number, os.strerror(number))
        written.append(os.fstat(descriptor).st_ino)
        return pwritev(descriptor, views[:2], offset)  # the header and the keys

    cache.layers[1].reset()  # its own file is too small
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        cache.update(*states[1], 1)
        cache._pager.flush()
    assert len(written) == 1 and set(written) < before
    assert files(cache, "free")
    assert files(cache, "partial") == []
    with pytest.raises(StorageFullError if number == errno.ENOSPC else ShardIOError):
        cache._pager.check()
    assert files(cache, "free") == []  # all the room there is for the next try
    cache._pager.flush()
    assert torch.equal(cache.layers[1].keys, states[1][0])
    assert torch.equal(cache.layers[1].values, states[1][1])
    assert not inodes(files(cache, "safetensors")) & before


def test_a_shard_that_is_never_written_gives_its_file_back(small_store, held_open):
    write(new_shard(small_store))
    before = held_open(small_store.path.glob("*.free"))
    new_shard(small_store)  # an interrupt comes before it is written
    assert small_store.used_bytes == 0
    assert inodes(small_store.path.glob("layer-*")) == before
    shard = new_shard(small_store)
    write(shard)
    assert inodes([shard.path]) == before == inodes(small_store.path.glob("layer-*"))
    del shard


def test_copies_stay_whole_when_the_original_is_reset_and_filled_again(make_cache):
    cache = make_cache(block_size=16)
    states = fill(cache)
    copied = copy.deepcopy(cache)
    reset(cache)
    again = fill(cache)
    assert files(cache, "free") == []
    assert_holds(copied, states)
    assert_holds(cache, again)
    copied.close()
    del copied
    gc.collect()
    free = inodes(files(cache, "free"))
    assert len(free) == LAYERS
    assert_holds(cache, again)
    for layer_idx in range(LAYERS):
        cache.update(*torch.randn(2, 1, 2, 64, 16), layer_idx)
    cache._pager.flush()
    assert free < inodes(files(cache, "safetensors"))


def test_cropped_tokens_leave_their_files_to_new_ones(make_cache, held_open):
    cache = make_cache(block_size=16)
    first, second = fill(cache), fill(cache)
    before = held_open(files(cache, "safetensors"))
    cache._pager.flush()
    cache.crop(-64)
    assert_holds(cache, first)
    states = fill(cache)
    assert inodes(files(cache, "safetensors")) == before
    assert_holds(cache, torch.cat([first, states], dim=4))
    assert not torch.equal(second, states)


@pytest.mark.parametrize("collected", [True, False])
def test_a_file_is_free_only_once_the_shards_own_descriptor_is_closed(collected, small_store, monkeypatch):
    open_then, forget = [], store._forget

    def watched(path, *arguments):
        links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        open_then.append(path in links)
        forget(path, *arguments)

    monkeypatch.setattr(store, "_forget", watched)
    shard = new_shard(small_store)
    write(shard)
    assert shard._descriptor is not None
    if collected:
        shard.itself = shard
    gone = weakref.ref(shard)
    del shard
    gc.collect()
    assert gone() is None
    assert open_then == [False]


def test_no_finalizer_waits_for_a_thread_that_makes_a_shard(small_store):
    """The collector may run it in that very thread, or in one that the thread waits for."""
    shard = new_shard(small_store)
    write(shard)
    shards = [shard]
    del shard
    with small_store._mutex:
        dropping = threading.Thread(target=shards.clear)
        dropping.start()
        dropping.join(10)
        assert not dropping.is_alive()
    assert small_store.used_bytes == 0


def test_closing_leaves_no_free_file(make_cache, offload_dir):
    cache = make_cache(block_size=16)
    fill(cache)
    reset(cache)
    assert files(cache, "free")
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in cache.offload_path.iterdir())
    cache.close()
    assert list(offload_dir.iterdir()) == []


def test_free_files_of_a_killed_process_are_swept(offload_dir):
    program = """
        import sys, time, torch
        from nvme_cache import OffloadedNVMeCache
        cache = OffloadedNVMeCache(offload_dir=sys.argv[1], block_size=16, host_budget=0)
        cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
        cache._pager.flush()
        cache.reset()
        print("ready", flush=True)
        time.sleep(60)
    """
    process = start(program, offload_dir)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(offload_dir.rglob("*.free"))
    OffloadedNVMeCache(offload_dir=offload_dir).close()
    assert list(offload_dir.iterdir()) == []


def test_a_forked_child_leaves_its_parents_free_files_alone(make_cache):
    cache = make_cache(block_size=16)
    fill(cache, tokens=128)
    reset(cache)
    states = fill(cache, tokens=64)
    before = {path: path.stat().st_ino for path in cache.offload_path.iterdir()}
    child = os.fork()
    if child == 0:
        cache.reset()
        cache.close()
        del cache
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path: path.stat().st_ino for path in cache.offload_path.iterdir()} == before
    assert_holds(cache, states)
