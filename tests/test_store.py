"""The folder: made, locked, swept, deleted; never another's, never a live one's; every broken world a typed error."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from nvme_cache import (
    CacheClosedError,
    CacheMisuseError,
    ConfigurationError,
    OffloadDirectoryError,
    OffloadedNVMeCache,
    StorageFullError,
)

GENERATE_FOREVER = """
    import sys, torch
    from nvme_cache import OffloadedNVMeCache
    cache = OffloadedNVMeCache(offload_dir=sys.argv[1], block_size=16, host_budget=0)
    states = torch.randn(2, 1, 2, 64, 16)
    cache.update(*states, 0)
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)  # waits until the shard is written
    print("ready", flush=True)
    while True:
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
        cache.crop(-max(0, cache.get_seq_length() - 2000))
"""


def start(program, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def generating(offload_dir):
    process = start(GENERATE_FOREVER, offload_dir)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_process_is_swept_by_the_next_cache_and_a_live_one_never_touched(offload_dir, generating):
    (folder,) = offload_dir.iterdir()
    with OffloadedNVMeCache(offload_dir=offload_dir, host_budget=0) as cache:
        assert set(offload_dir.iterdir()) == {folder, cache.offload_path}
        assert list(folder.glob("*.safetensors"))
    assert list(offload_dir.iterdir()) == [folder]
    assert generating.poll() is None
    generating.send_signal(signal.SIGKILL)
    generating.wait()
    assert list(folder.glob("*.safetensors"))
    with OffloadedNVMeCache(offload_dir=offload_dir, host_budget=0) as cache:
        assert list(offload_dir.iterdir()) == [cache.offload_path]
    assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_other_signals_leave_nothing_the_next_start_does_not_remove(number, offload_dir, generating):
    time.sleep(0.2)
    generating.send_signal(number)
    generating.wait()
    OffloadedNVMeCache(offload_dir=offload_dir).close()
    assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize(
    "ending",
    [
        "cache.close()",
        "del cache",
        "pass",
        "raise SystemExit(3)",
        "1 / 0",
        "import gc; l = [cache]; l.append(l); del cache, l; gc.collect()",
    ],
)
def test_every_ordinary_end_leaves_nothing(ending, offload_dir):
    program = f"""
        import sys, torch
        from nvme_cache import OffloadedNVMeCache
        cache = OffloadedNVMeCache(offload_dir=sys.argv[1], block_size=16, host_budget=0)
        for _ in range(3):
            for layer_idx in range(4):
                cache.update(*torch.randn(2, 1, 2, 64, 16), layer_idx)
        {ending}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), offload_dir], stderr=subprocess.DEVNULL)
    assert list(offload_dir.iterdir()) == []


def test_foreign_files_are_left_alone(offload_dir):
    """Also what looks like ours: an unpacked copy of this project, a folder of our name with someone's file in it."""
    for name in ("nvme-cached-notes", "model.safetensors", "nvme-cache-12-abcdefgh"):
        (offload_dir / name).write_text("mine")
    for name in ("other", "nvme-cache-main", "nvme-cache-34-abcdefgh", "nvme-cache-56-abcdefgh"):
        (offload_dir / name).mkdir()
        (offload_dir / name / "thesis.txt").write_text("mine")
    (offload_dir / "nvme-cache-56-abcdefgh" / "lock").touch()
    (offload_dir / "nvme-cache-78-abcdefgh").symlink_to(offload_dir / "other")
    before = sorted(path.read_text() for path in offload_dir.rglob("*") if path.is_file())
    OffloadedNVMeCache(offload_dir=offload_dir).close()
    assert sorted(path.read_text() for path in offload_dir.rglob("*") if path.is_file()) == [
        text for text in before if text
    ]


def test_a_folder_whose_maker_died_before_locking_it_is_removed(offload_dir):
    (offload_dir / "nvme-cache-12-abcdefgh").mkdir()
    OffloadedNVMeCache(offload_dir=offload_dir).close()
    assert list(offload_dir.iterdir()) == []


def test_a_relative_folder_stays_where_it_is_when_the_process_moves(offload_dir, monkeypatch):
    monkeypatch.chdir(offload_dir.parent)
    cache = OffloadedNVMeCache(offload_dir="offload", block_size=16, host_budget=0)
    states = torch.randn(2, 1, 2, 64, 16)
    cache.update(*states, 0)
    monkeypatch.chdir("/")
    assert torch.equal(cache.update(*torch.zeros(2, 1, 2, 1, 16), 0)[0][:, :, :64], states[0])
    cache.update(*states, 0)
    cache.close()
    assert list(offload_dir.iterdir()) == []


def test_an_ended_forked_child_does_not_give_up_the_parents_lock(offload_dir):
    """Whatever the child does to its copy of the cache, a third process must find the parent's folder locked."""
    program = """
        import os, sys, torch
        from nvme_cache import OffloadedNVMeCache
        cache = OffloadedNVMeCache(offload_dir=sys.argv[1], block_size=16, host_budget=0)
        cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
        if os.fork() == 0:
            cache.close()
            del cache
            sys.exit()
        os.wait()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import sys; from nvme_cache import OffloadedNVMeCache; "
                                      "OffloadedNVMeCache(offload_dir=sys.argv[1])", sys.argv[1]])
        os.wait()
        assert list(cache.offload_path.glob("*.safetensors"))
        assert cache.update(*torch.randn(2, 1, 2, 1, 16), 0)[0].shape[2] == 66
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), offload_dir], check=True)
    assert list(offload_dir.iterdir()) == []


def test_many_processes_start_and_die_at_once(offload_dir):
    """The race between claiming a folder and sweeping it: no one loses a live folder, nothing is left."""
    program = """
        import os, random, sys, torch
        from nvme_cache import OffloadedNVMeCache
        for turn in range(15):
            cache = OffloadedNVMeCache(offload_dir=sys.argv[1], block_size=16, host_budget=0)
            cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
            cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
            assert list(cache.offload_path.glob("*.safetensors")), "swept while alive"
            cache.close()
        os._exit(0 if random.random() < 0.5 else OffloadedNVMeCache(offload_dir=sys.argv[1]) and 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), offload_dir]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    OffloadedNVMeCache(offload_dir=offload_dir).close()
    assert list(offload_dir.iterdir()) == []


def test_a_forked_child_neither_deletes_nor_uses_its_parents_cache(make_cache):
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
        except CacheMisuseError:
            cache.close()
            del cache
            gc.collect()
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(cache.offload_path.glob("*.safetensors"))
    assert cache.update(*torch.randn(2, 1, 2, 1, 16), 0)[0].shape[2] == 66


def test_closing_twice_is_fine_and_using_a_closed_cache_is_an_error(make_cache):
    cache = make_cache()
    cache.close()
    cache.close()
    with pytest.raises(CacheClosedError, match="was closed"):
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)


def test_a_missing_folder(tmp_path):
    with pytest.raises(OffloadDirectoryError, match=r"offload_dir='.*nowhere' does not exist.*mkdir -p"):
        OffloadedNVMeCache(offload_dir=tmp_path / "nowhere")


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadDirectoryError, match=r"offload_dir='.*file' is not a folder"):
        OffloadedNVMeCache(offload_dir=tmp_path / "file")


def test_a_read_only_folder(tmp_path):
    """In a process without root's powers: for root no folder is read-only."""
    tmp_path.chmod(0o555)
    program = """
        import os, sys
        from nvme_cache import OffloadDirectoryError, OffloadedNVMeCache
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            OffloadedNVMeCache(offload_dir=sys.argv[1])
        except OffloadDirectoryError as error:
            print(error)
    """
    for folder in [tmp_path, *list(tmp_path.parents)[:2]]:
        folder.chmod(0o755 if folder != tmp_path else 0o555)
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], capture_output=True, text=True)
    assert f"cannot write to offload_dir={str(tmp_path)!r}: Permission denied" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", -16),
        ("block_size", 2.5),
        ("block_size", True),
        ("device_budget", -1),
        ("device_budget", "lots"),
        ("host_budget", "12 parsecs"),
        ("host_budget", None),
        ("host_budget", 1.5),
        ("disk_budget", -5),
        ("offload_dir", ""),
        ("prefetch_depth", -1),
        ("io_threads", 0),
    ],
)
def test_nonsense_arguments_name_the_value_before_anything_is_made(name, value, offload_dir):
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        OffloadedNVMeCache(**({"offload_dir": offload_dir} | {name: value}))
    assert list(offload_dir.iterdir()) == []


def test_unknown_arguments_are_refused(offload_dir):
    with pytest.raises(TypeError, match="blocksize"):
        OffloadedNVMeCache(offload_dir=offload_dir, blocksize=16)


def test_sizes_as_text(offload_dir, make_cache):
    cache = make_cache(host_budget="1MiB", device_budget="2KB", disk_budget="1GiB")
    assert cache._pager._budgets.host_bytes == 1 << 20
    assert cache._pager._budgets.device_bytes == 2000


def test_the_disk_budget_is_checked_before_writing_and_nothing_is_lost(make_cache):
    cache = make_cache(
        block_size=16, disk_budget=2 * 12288
    )  # two shards: a header page, a page each of keys and values
    states = torch.randn(2, 1, 2, 32, 16)
    for layer_idx in range(2):
        cache.update(*states, layer_idx)
    with pytest.raises(StorageFullError, match=r"disk_budget=24,576 with 24,576 in use"):
        cache.update(*states, 2)
    # The forward is taken back whole, so that the same call can be made again once there is room.
    assert [cache.get_seq_length(layer_idx) for layer_idx in range(3)] == [0, 0, 0]
    for layer_idx in range(2):
        cache.update(*states, layer_idx)
    keys, _ = cache.update(*torch.zeros(2, 1, 2, 1, 16), 0)
    assert torch.equal(keys[:, :, :32], states[0])


def test_closing_in_another_thread_hangs_nothing(make_cache):
    for _ in range(20):
        cache = make_cache(block_size=16)
        for layer_idx in range(4):
            cache.update(*torch.randn(2, 1, 2, 200, 16), layer_idx)
        closing = threading.Timer(0.01, cache.close)
        closing.start()
        with pytest.raises(CacheClosedError):
            while True:
                for layer_idx in range(4):
                    cache.update(*torch.randn(2, 1, 2, 1, 16), layer_idx)
        closing.join()


def test_a_closed_cache_holds_no_memory(make_cache):
    cache = make_cache(block_size=16, host_budget=1 << 30)
    for layer_idx in range(3):
        cache.update(*torch.randn(2, 1, 2, 200, 16), layer_idx)
    blocks = weakref.ref(cache.layers[0]._history.runs[0].blocks.parts[0][0])
    cache.close()
    assert blocks() is None
    assert set(cache.memory_usage().values()) == {0}


def test_few_descriptors_are_shared_by_all_caches(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.io.open_file_allowance", lambda: 3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    caches = [make_cache(block_size=16) for _ in range(3)]
    states = torch.randn(2, 1, 2, 64, 16)
    for cache in caches:
        for layer_idx in range(4):
            cache.update(*states, layer_idx)
        cache._pager.flush()
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 3 + len(caches)  # and a lock each
    for cache in caches:
        for layer_idx in range(4):
            assert torch.equal(cache.update(*torch.zeros(2, 1, 2, 1, 16), layer_idx)[0][:, :, :64], states[0])


def test_a_folder_that_takes_no_bytes_is_refused_and_left_clean(offload_dir, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nvme_cache.io.write_all", fail)
    with pytest.raises(OffloadDirectoryError, match="No space left on device"):
        OffloadedNVMeCache(offload_dir=offload_dir)
    assert list(offload_dir.iterdir()) == []


def test_the_default_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NVME_CACHE_DIR", str(tmp_path))
    with OffloadedNVMeCache() as cache:
        assert cache.offload_path.parent == tmp_path
    monkeypatch.delenv("NVME_CACHE_DIR")
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    with OffloadedNVMeCache() as cache:
        assert (tmp_path / "assets" / "nvme_cache") in cache.offload_path.parents


def test_a_ram_backed_folder_is_warned_about_once(caplog):
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs here")
    for _ in range(2):
        OffloadedNVMeCache(offload_dir="/dev/shm").close()
    warnings = [record.message for record in caplog.records if "live in RAM" in record.message]
    assert len(warnings) == 1


def test_file_systems_without_direct_io_work_and_are_named(make_cache, monkeypatch, caplog):
    monkeypatch.setattr("nvme_cache.io.supports_direct", lambda folder: False)
    cache = make_cache(block_size=16)
    states = torch.randn(2, 1, 2, 64, 16)
    cache.update(*states, 0)
    assert torch.equal(cache.update(*torch.zeros(2, 1, 2, 1, 16), 0)[0][:, :, :64], states[0])
    assert any("refuses O_DIRECT" in record.message for record in caplog.records)


def test_without_direct_io_the_kernel_reads_ahead_and_keeps_nothing(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.io.supports_direct", lambda folder: False)
    cache = make_cache(block_size=16, io_threads=1)
    for _ in range(3):
        cache.update(*torch.randn(2, 1, 2, 64, 16), 0)  # a shard each
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    advised = []
    monkeypatch.setattr("nvme_cache.io.advise", lambda _, *advice, will_need: advised.append((will_need, advice)))
    cache.layers[0]._abandon_slot()
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    both = (4096, 2 * 64 * 2 * 16 * 4)  # keys and values, behind the header
    assert advised == [(True, both), (False, both), (True, both), (False, both), (False, both)]


def test_threads_and_descriptors_are_given_back(offload_dir):
    def count():
        gc.collect()
        return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]

    def once():
        with OffloadedNVMeCache(offload_dir=offload_dir, block_size=16, host_budget=0) as cache:
            for _ in range(3):
                for layer_idx in range(4):
                    cache.update(*torch.randn(2, 1, 2, 64, 16), layer_idx)

    once()
    before = count()
    for _ in range(20):
        once()
    assert count() == before
