"""The store of snapshots: its limit in physical bytes, what goes first, and many processes at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nvme_cache import ConfigurationError, OffloadDirectoryError, OffloadedNVMeCache, SnapshotStore, StorageFullError
from nvme_cache.cli import app

from .conftest import prompt, tiny_model
from .test_snapshots import filled, next_logits

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def default_folder(tmp_path, monkeypatch):
    (tmp_path / "default").mkdir()
    monkeypatch.setenv("NVME_CACHE_DIR", str(tmp_path / "default"))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "store", size_limit="1GB")


def taken(folder):
    """Bytes on the drive under a folder, as the kernel counts them, each file once."""
    files = {}
    for path in folder.rglob("*"):
        found = path.lstat()
        files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def kept(store):
    return [entry.manifest.num_tokens for entry in store.entries()]


def save(store, model, make_cache, length, **options):
    cache, ids = filled(model, make_cache, length, **options)
    path = store.save(cache, model=model, token_ids=ids)
    cache.close()
    return path


def age(path, seconds):
    for name in ("manifest.json", "in-use.lock"):
        if (path / name).exists():
            os.utime(path / name, (time.time() - seconds, time.time() - seconds))


def test_what_is_saved_is_found_by_its_tokens(store, model, make_cache):
    ids = prompt(80)
    for length in (30, 60, 45):
        save(store, model, make_cache, length)
    other = ids.clone()
    other[0, 50] += 1
    found = store.find(other, model=model)
    assert [match.length for match in found] == [50, 45, 30]
    assert [match.manifest.num_tokens for match in found] == [60, 45, 30]
    assert store.find(torch.cat([ids, ids]), model=model) == []
    assert store.find(other[:, 1:], model=model) == []


def test_the_same_tokens_are_saved_once(store, model, make_cache):
    first = save(store, model, make_cache, 40)
    before = {path.name: path.stat().st_mtime_ns for path in first.glob("*.safetensors")}
    assert save(store, model, make_cache, 40) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.glob("*.safetensors")} == before


def test_the_least_recently_used_goes_first(store, model, make_cache):
    paths = [save(store, model, make_cache, length) for length in (40, 50, 60)]
    for path, seconds in zip(paths, (300, 200, 100), strict=True):
        age(path, seconds)
    OffloadedNVMeCache.from_pretrained(paths[0], model=model, host_budget=0).close()  # counts as a use
    assert kept(store) == [40, 60, 50]
    limited = SnapshotStore(store.path, size_limit=store.used_bytes - 1)
    assert limited.prune() == [paths[1].name]
    assert kept(store) == [40, 60]
    assert limited.used_bytes == taken(store.path) <= limited.size_limit


def test_what_is_pinned_or_open_stays(store, model, make_cache):
    paths = [save(store, model, make_cache, length) for length in (40, 50, 60)]
    store.pin(paths[0].name)
    with OffloadedNVMeCache.from_pretrained(paths[1], model=model, host_budget=0) as cache:
        expected = next_logits(model, filled(model, make_cache, 50)[0])
        assert SnapshotStore(store.path, size_limit=0).prune() == [paths[2].name]
        assert not store.remove(paths[1].name)
        assert torch.equal(next_logits(model, cache), expected)
    del cache
    store.pin(paths[0].name, pinned=False)
    assert sorted(SnapshotStore(store.path, size_limit=0).prune()) == sorted(path.name for path in paths[:2])
    assert [path.name for path in store.path.iterdir()] == ["store.lock"]


def test_old_ones_go_by_themselves(store, model, make_cache):
    paths = [save(store, model, make_cache, length) for length in (40, 50)]
    age(paths[0], 100)
    assert SnapshotStore(store.path, size_limit="1GB", ttl_s=50).prune() == [paths[0].name]
    assert kept(store) == [50]


def test_a_snapshot_that_does_not_fit_is_not_saved(store, model, make_cache):
    path = save(store, model, make_cache, 40)
    store.pin(path.name)
    small = SnapshotStore(store.path, size_limit=store.used_bytes + 20_000)
    with pytest.raises(StorageFullError, match=r"size_limit=.* are in use or pinned"):
        save(small, model, make_cache, 60)
    assert kept(store) == [40]


def test_the_limit_holds_at_every_moment(store, model, make_cache, monkeypatch):
    """Looked at whenever something is written."""
    for length in (40, 50):
        save(store, model, make_cache, length)
    limited, most = SnapshotStore(store.path, size_limit=store.used_bytes * 3 // 2), []
    original = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (original(descriptor), most.append(taken(store.path))))
    for length in (60, 70, 80, 90):
        save(limited, model, make_cache, length, host_budget=10_000)
    assert most and max(most) <= limited.size_limit
    assert kept(store)[0] == 90


def test_shards_that_snapshots_share_count_once(store, model, make_cache):
    cache, ids = filled(model, make_cache, 640)
    store.save(cache, model=model, token_ids=ids)
    alone = store.used_bytes
    next_logits(model, cache)
    store.save(cache, model=model, token_ids=torch.cat([ids, torch.tensor([[7]])], dim=1))
    sealed = cache.memory_usage()["nvme"]
    assert len(store.entries()) == 2
    assert store.used_bytes == taken(store.path) < 2 * alone - sealed / 2


def test_what_was_never_finished_goes(store, model, make_cache):
    path = save(store, model, make_cache, 40)
    (path / "manifest.json").unlink()
    assert store.entries() == []
    store.prune()
    assert [path.name for path in store.path.iterdir()] == ["store.lock"]


def test_names_and_arguments(store, model, make_cache):
    path = save(store, model, make_cache, 40)
    store.pin(path.name[:6])
    assert store.entries()[0].is_pinned
    for name in ("", "none"):
        with pytest.raises(ConfigurationError, match="snapshots called"):
            store.remove(name)
    with pytest.raises(ConfigurationError, match="size_limit"):
        SnapshotStore(store.path, size_limit="much")
    with pytest.raises(ConfigurationError, match="ttl_s"):
        SnapshotStore(store.path, size_limit=1, ttl_s=0)


class TestCommands:
    @pytest.fixture
    def run(self):
        def run(*arguments, code=0):
            result = CliRunner().invoke(app, [str(argument) for argument in arguments])
            assert result.exit_code == code, result.output
            return result.stdout or result.stderr

        return run

    @pytest.fixture
    def paths(self, store, model, make_cache):
        paths = [save(store, model, make_cache, length) for length in (40, 50)]
        age(paths[0], 3 * 86_400)
        return paths

    def test_inspect_says_what_a_snapshot_holds(self, run, paths):
        said = run("inspect", paths[1])
        for part in (
            "llama, ",
            "50 in each of 1 batch rows",
            "48, of 16 tokens each",
            "exact",
            "4 NVMeLayer",
            "to compute",
        ):
            assert part in said
        assert json.loads(run("inspect", paths[1], "--json"))["num_tokens"] == 50
        assert "holds no snapshot" in run("inspect", paths[1].parent, code=2)

    def test_ls_lists_them(self, run, paths, store):
        said = run("ls", store.path)
        assert "2 snapshots take" in said
        assert said.index(paths[1].name) < said.index(paths[0].name)
        (first, second) = json.loads(run("ls", store.path, "--json"))
        assert (first["tokens"], second["tokens"], second["pinned"]) == (50, 40, False)

    def test_pin_prune_and_rm(self, run, paths, store, model):
        run("pin", store.path, paths[0].name)
        assert "* pinned" in run("ls", store.path)
        assert run("prune", store.path, "--size-limit", "1GB", "--ttl-days", "2") == ""
        run("unpin", store.path, paths[0].name)
        assert run("prune", store.path, "--size-limit", "1GB", "--ttl-days", "2").split() == [paths[0].name]
        with OffloadedNVMeCache.from_pretrained(paths[1], model=model, host_budget=0):
            assert "is open in some process" in run("rm", store.path, paths[1].name, code=1)
            assert "are pinned or open" in run("prune", store.path, "--size-limit", "0", code=1)
        run("rm", store.path, paths[1].name)
        assert store.entries() == []
        assert "snapshots called" in run("rm", store.path, "none", code=2)


WORKER = """
import random, sys, time
import torch
from nvme_cache import OffloadedNVMeCache, SnapshotCorruptedError, SnapshotStore, StorageFullError
from tests.conftest import prompt, tiny_model
from tests.test_snapshots import filled, next_logits
torch.set_num_threads(1)
folder, limit, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
chance, model, store = random.Random(seed), tiny_model(), SnapshotStore(folder + "/store", size_limit=limit)
def make(**options):
    return OffloadedNVMeCache(offload_dir=folder, host_budget=0, io_threads=2, **options)
expected, counts = {}, {"saved": 0, "opened": 0, "full": 0, "gone": 0, "pruned": 0}
end = time.monotonic() + seconds
while time.monotonic() < end:
    length = chance.choice(range(20, 120, 10))
    action = chance.choice(["save", "open", "open", "prune"])
    if action == "save":
        cache, ids = filled(model, make, length)
        with cache:
            try:
                store.save(cache, model=model, token_ids=ids)
                counts["saved"] += 1
            except StorageFullError:
                counts["full"] += 1
    elif action == "open":
        for match in store.find(prompt(length), model=model)[:1]:
            try:
                opened = OffloadedNVMeCache.from_pretrained(match.path, model=model, offload_dir=folder, host_budget=0)
            except SnapshotCorruptedError:
                assert not (match.path / "manifest.json").exists() or counts["gone"] < 50
                counts["gone"] += 1
                continue
            with opened as cache:
                time.sleep(chance.uniform(0, 0.05))  # before anything is read
                held = cache.get_seq_length()
                if held not in expected:
                    with filled(model, make, held)[0] as own:
                        expected[held] = next_logits(model, own)
                assert torch.equal(next_logits(model, cache), expected[held])
                counts["opened"] += 1
    else:
        store.prune()
        counts["pruned"] += 1
print(counts)
"""


def stress(folder, processes, seconds):
    """Processes that save, open and evict at once; how often each did what."""
    model = tiny_model()
    folder.mkdir(exist_ok=True)
    with OffloadedNVMeCache(config=model.config, block_size=16, offload_dir=folder, host_budget=0) as cache:
        ids = prompt(110)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        measure = SnapshotStore(folder / "measure", size_limit="1GB")
        measure.save(cache, model=model, token_ids=ids)
        limit = 4 * measure.used_bytes
    commands = [
        [sys.executable, "-W", "ignore", "-c", WORKER, str(folder), str(limit), str(seconds), str(seed)]
        for seed in range(processes)
    ]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for command in commands
    ]
    largest = 0
    while any(worker.poll() is None for worker in workers):
        with_lock = SnapshotStore(folder / "store", size_limit=limit)
        largest = max(largest, with_lock.used_bytes)
        time.sleep(0.05)
    outcomes = [worker.communicate() for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), "".join(error[-1500:] for _, error in outcomes)
    assert largest <= limit
    return [eval(out) for out, _ in outcomes]


def test_many_processes_share_a_store(tmp_path):
    counts = stress(tmp_path / "shared", 4, 6)
    assert sum(each["saved"] for each in counts) > 10
    assert sum(each["opened"] for each in counts) > 10


@pytest.mark.slow
def test_ten_processes_share_a_store_for_a_minute(tmp_path):
    counts = stress(tmp_path / "shared", 10, 60)
    assert sum(each["saved"] for each in counts) > 100
    assert sum(each["opened"] for each in counts) > 100


def test_a_store_must_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(OffloadDirectoryError, match="cannot make the store"):
            SnapshotStore(path, size_limit="1GB")


def test_what_is_pinned_stays_even_where_it_cannot_be_read(store, model, make_cache):
    path = save(store, model, make_cache, 40)
    store.pin(path.name)
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace('"version": 1', '"version": 2'))
    assert store.prune() == [] and list(path.glob("layer-*"))
