"""Snapshots elsewhere: in memory, by file:// and on a real S3 server of this machine, read through block by block."""

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path
from threading import Barrier, Thread

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from transformers import DynamicCache

from nvme_cache import (
    ConfigurationError,
    OffloadedNVMeCache,
    ShardCorruptedError,
    ShardIOError,
    SnapshotCorruptedError,
    SnapshotIOError,
    StorageFullError,
)
from nvme_cache.buffers import HostBuffer
from nvme_cache.shards import Shard, spread
from nvme_cache.snapshots.remote import Remote, RemoteShard, place_of
from nvme_cache.store import remove_orphans
from nvme_cache.transfer import transfer_for

from .conftest import exact_and_int8, prompt, tiny_model, tokens
from .test_snapshots import BLOCK_SIZE, filled, next_logits

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

URL = "memory://shelf/report"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def s3():
    """A bucket on an S3 server of our own; what it gives is the URL."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    given = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        try:
            for _ in range(200):
                assert server.poll() is None, "the S3 server ended"
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.kill()
            server.wait()


@pytest.fixture(params=["memory", "s3"])
def url(request):
    """The URL of a snapshot, with nothing there."""
    shelf = request.getfixturevalue("s3") if request.param == "s3" else "memory://shelf"
    return f"{shelf}/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small for more, and the other process's bits depend on it."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def clean_memory():
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def opened(tmp_path):
    """Opens snapshots; closed, they leave nothing."""
    private, caches = tmp_path / "private", []
    private.mkdir()

    def open_one(place, **options):
        caches.append(OffloadedNVMeCache.from_pretrained(place, **{"offload_dir": private, "host_budget": 0} | options))
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()
    assert list(private.iterdir()) == []


@pytest.fixture
def requests(monkeypatch):
    """Names and byte ranges that are asked for, as the server sees them."""
    seen = []
    call, cat = s3fs.S3FileSystem._call_s3, MemoryFileSystem.cat_file

    async def call_s3(self, method, *args, **options):
        if method == "get_object":
            start, end = options["Range"].removeprefix("bytes=").split("-") if "Range" in options else (None, None)
            bounds = (None, None) if start is None else (int(start), int(end) + 1)
            seen.append((options["Key"].rpartition("/")[2], *bounds))
        return await call(self, method, *args, **options)

    def cat_file(self, path, start=None, end=None, **options):
        seen.append((path.rpartition("/")[2], start, end))
        return cat(self, path, start=start, end=end, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call_s3)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return seen


def names_at(url):
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    return {each.rpartition("/")[2] for each in fs.ls(path, detail=False)} if fs.exists(path) else set()


def bytes_at(url):
    fs, path = fsspec.url_to_fs(url)
    return {name: fs.cat_file(f"{path}/{name}") for name in names_at(url)}


def change(url, how):
    """Replaces what an object holds."""
    fs, path = fsspec.url_to_fs(url)
    fs.pipe_file(path, how(fs.cat_file(path)))


def shards_of(cache):
    """The shards of a cache, layer by layer."""
    blocks = (run.blocks for layer in cache.layers for run in layer._history.runs)
    return [each for each in blocks if isinstance(each, Shard)]


def used_bytes(cache):
    return cache._pager.store.used_bytes


def saved(url, make_cache, length=75, **options):
    """A model, what a saved cache of it goes on with, and the prompt."""
    model = tiny_model()
    cache, ids = filled(model, make_cache, length=length, **options)
    cache.save_pretrained(url, token_ids=ids, model=model)
    return model, cache, ids


class TestRoundTrip:
    @exact_and_int8
    def test_one_more_token_is_the_same_to_the_bit(self, url, make_cache, opened, quantization):
        model = tiny_model("gemma3")
        cache, ids = filled(model, make_cache, rows=2)
        cache.save_pretrained(url, token_ids=ids, model=model)
        ours = opened(url, model=model)
        for token in (7, 8, 9):
            assert torch.equal(next_logits(model, ours, token, 2), next_logits(model, cache, token, 2))

    @pytest.mark.parametrize("tier", [{"host_budget": 0}, {"host_budget": 1 << 30}, {"device_budget": 1 << 30}])
    def test_whatever_the_tier(self, make_cache, opened, tier):
        model, cache, _ = saved(URL, make_cache, **tier)
        assert torch.equal(next_logits(model, opened(URL, model=model)), next_logits(model, cache))

    def test_what_is_generated_after_it_is_what_one_cache_would(self, url, make_cache, opened):
        model, _, ids = saved(url, make_cache)
        whole = tokens(model, ids, DynamicCache(config=model.config))
        assert torch.equal(tokens(model, whole[:, :80], opened(url, model=model), max_new_tokens=19), whole)

    def test_in_another_process(self, s3, make_cache, tmp_path):
        url = f"{s3}/shared"
        model, cache, _ = saved(url, make_cache)
        torch.save(next_logits(model, cache), tmp_path / "logits")
        program = f"""
import torch
from nvme_cache import OffloadedNVMeCache
from tests.conftest import tiny_model
from tests.test_snapshots import next_logits
torch.set_num_threads(1)
model = tiny_model()
with OffloadedNVMeCache.from_pretrained({url!r}, model=model, offload_dir={str(tmp_path)!r}) as cache:
    assert torch.equal(next_logits(model, cache), torch.load({str(tmp_path / "logits")!r}))
"""
        subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)

    def test_a_file_url_is_the_path(self, make_cache, opened, tmp_path):
        model, cache, _ = saved(f"file://{tmp_path}/snapshot", make_cache, host_budget=0)
        own = {path.stat().st_ino for path in cache.offload_path.glob("layer-*.safetensors")}
        assert own
        assert {path.stat().st_ino for path in (tmp_path / "snapshot").glob("layer-*")} == own
        expected = next_logits(model, cache)
        for place in (f"file://{tmp_path}/snapshot", tmp_path / "snapshot"):
            ours = opened(place, model=model)
            assert not any(isinstance(shard, RemoteShard) for shard in shards_of(ours))
            assert torch.equal(next_logits(model, ours), expected)

    def test_saved_again_elsewhere_it_is_the_same_file(self, url, make_cache, opened, tmp_path):
        """Shards that were only partly read are downloaded whole, header included."""
        model, cache, ids = saved(url, make_cache)
        ours = opened(url, model=model)
        ours.save_pretrained(tmp_path / "copy", token_ids=ids, model=model)
        there = sorted(content for name, content in bytes_at(url).items() if name.startswith("layer-"))
        assert sorted(path.read_bytes() for path in (tmp_path / "copy").glob("layer-*")) == there
        expected = next_logits(model, cache)
        assert torch.equal(next_logits(model, opened(tmp_path / "copy", model=model)), expected)
        assert torch.equal(next_logits(model, ours), expected)

    def test_saved_again_where_it_came_from(self, url, make_cache, opened):
        model, _, ids = saved(url, make_cache)
        ours = opened(url, model=model)
        longer = tokens(model, torch.cat([ids, ids[:, :1]], 1), ours)
        before = names_at(url)
        ours.save_pretrained(url, model=model)
        assert names_at(url) & before == {"manifest.json"}
        assert ours.get_seq_length() == longer.shape[1] - 1
        assert torch.equal(next_logits(model, opened(url, model=model)), next_logits(model, ours))


class TestReadingThrough:
    def test_opening_downloads_no_block(self, url, make_cache, opened, requests):
        model, _, _ = saved(url, make_cache)
        requests.clear()
        ours = opened(url, model=model)
        assert [(name.partition("-")[0], *bounds) for name, *bounds in requests] == [
            ("manifest.json", None, None),
            ("states", None, None),
        ]
        assert used_bytes(ours) == 0
        assert list(ours.offload_path.glob("layer-*")) == []

    def test_each_block_is_downloaded_once(self, url, make_cache, opened, requests):
        model, cache, ids = saved(url, make_cache)
        cache.save_pretrained(url, token_ids=ids, model=model)
        ours = opened(url, model=model)
        shards = shards_of(ours)
        wanted = sorted(
            (shard._name, shard.sections[0][0].offset, shard.sections[-1][-1].offset + shard.sections[-1][-1].nbytes)
            for shard in shards
        )
        requests.clear()
        expected = next_logits(model, cache)
        assert torch.equal(next_logits(model, ours), expected)
        assert sorted(requests) == wanted  # keys and values, without the header
        fork = ours.fork()
        ours.crop(-1)
        fork.crop(-1)
        with fork:
            assert torch.equal(next_logits(model, ours), expected)
            assert torch.equal(next_logits(model, fork), expected)
        assert len(requests) == len(wanted)
        sizes = [sum(section.padded_nbytes for section in chain(*shard.sections)) for shard in shards]
        assert used_bytes(ours) == sum(sizes)
        for path in ours.offload_path.glob("layer-*"):
            assert path.stat().st_mode & 0o777 == 0o600

    def test_a_prefix_is_all_that_is_downloaded(self, url, make_cache, opened, requests):
        model = tiny_model()
        cache = make_cache(config=model.config, block_size=BLOCK_SIZE)
        tokens(model, prompt(40), cache, max_new_tokens=30)  # a shard of two blocks, then shards of one
        cache.save_pretrained(url, model=model)
        ours = opened(url, model=model)
        assert len(shards_of(ours)) == 4 * 3
        ours.crop(32 - ours.get_seq_length())
        kept = {shard._name for shard in shards_of(ours)}
        requests.clear()
        next_logits(model, ours)
        assert {name for name, *_ in requests} == kept
        assert len(kept) == 4

    def test_one_download_for_all_who_ask_at_once(self, make_cache, opened, requests, monkeypatch):
        model, _, _ = saved(URL, make_cache)
        shard = shards_of(opened(URL, model=model))[0]
        keys, values = shard.sections
        slow, everyone = Remote.read, Barrier(6)

        def read(self, *args):
            time.sleep(0.05)
            return slow(self, *args)

        monkeypatch.setattr(Remote, "read", read)
        requests.clear()
        found, threads = [], []

        def ask(sections):
            buffer = HostBuffer(transfer_for(torch.device("cpu")).host_memory(sum(s.padded_nbytes for s in sections)))
            everyone.wait()
            shard.read(sections, [[view] for view in spread(buffer.view, sections)])
            found.append((sections[0].name, len(sections), bytes(buffer.view)))

        for sections in (keys, values, keys + values) * 2:
            threads.append(Thread(target=ask, args=(sections,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        content = bytes_at(URL)[shard._name]
        for name, count, got in found:
            start = keys[0].offset if name == "keys" else values[0].offset
            assert got == content[start : start + len(got)]
            assert len(got) == count * keys[0].padded_nbytes
        assert len(found) == 6
        asked = [range(start, end) for name, start, end in requests if name == shard._name and start is not None]
        assert sum(map(len, asked)) == keys[0].nbytes + values[0].nbytes  # no byte twice
        assert shard._store.used_bytes == keys[0].padded_nbytes + values[0].padded_nbytes

    def test_only_the_part_that_is_read_takes_space(self, make_cache, opened, requests):
        model, _, _ = saved(URL, make_cache, length=2000, block_size=1000)
        shard = shards_of(opened(URL, model=model))[0]
        keys, values = shard.sections
        assert keys[0].padded_nbytes > 128 << 10
        buffer = HostBuffer(transfer_for(torch.device("cpu")).host_memory(values[0].padded_nbytes))
        requests.clear()
        shard.read(values, [[buffer.view]])
        assert requests == [(shard._name, values[0].offset, values[0].offset + values[0].nbytes)]
        status = shard.path.stat()
        assert status.st_size == shard.file_nbytes
        assert status.st_blocks * 512 < shard.file_nbytes - keys[0].nbytes // 2  # the rest is a hole


class TestUpload:
    def test_the_manifest_is_last(self, make_cache, monkeypatch):
        order = []
        for method in ("put_file", "pipe_file"):
            original = getattr(MemoryFileSystem, method)

            def record(self, *args, original=original, method=method, **options):
                order.append(args[1 if method == "put_file" else 0].rpartition("/")[2])
                return original(self, *args, **options)

            monkeypatch.setattr(MemoryFileSystem, method, record)
        saved(URL, make_cache)
        assert order[-1] == "manifest.json"
        assert set(order) == names_at(URL)
        assert len(order) == len(set(order)) == 4 + 2

    @pytest.mark.parametrize("moment", [0, 3, 4, 5])
    @pytest.mark.parametrize("over", [False, True], ids=["new", "over another"])
    def test_an_upload_that_fails_leaves_what_was_there(self, make_cache, opened, monkeypatch, moment, over):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        expected = None
        if over:
            other, other_ids = filled(model, make_cache, length=50)
            other.save_pretrained(URL, token_ids=other_ids, model=model)
            expected = next_logits(model, other)
        before, left = bytes_at(URL), [moment]

        def fail_in_time(self, path, mode="rb", **options):
            if "w" in mode:
                if left[0] == 0:
                    raise OSError(5, "the line is dead")
                left[0] -= 1
            return opening(self, path, mode, **options)

        opening = MemoryFileSystem.open
        monkeypatch.setattr(MemoryFileSystem, "open", fail_in_time)
        with pytest.raises(SnapshotIOError, match=r"cannot upload .*memory://shelf/report.*: .*the line is dead"):
            cache.save_pretrained(URL, token_ids=ids, model=model)
        monkeypatch.undo()
        after = bytes_at(URL)
        if moment < 5:
            assert after == before  # what had been uploaded is gone again
        else:  # the manifest itself: it might have arrived
            assert {name: after.get(name) for name in before} == before
            assert ("manifest.json" in after) == over
        if over:
            assert torch.equal(next_logits(model, opened(URL, model=model)), expected)
        else:
            with pytest.raises(SnapshotCorruptedError, match="memory://shelf/report holds no snapshot"):
                opened(URL, model=model)
        cache.save_pretrained(URL, token_ids=ids, model=model)
        assert torch.equal(next_logits(model, opened(URL, model=model)), next_logits(model, cache))

    def test_saving_again_replaces_the_files_and_no_others(self, url, make_cache, opened):
        model, _, _ = saved(url, make_cache)
        before = names_at(url)
        fs, path = fsspec.url_to_fs(url)
        strangers = {"notes.txt", "layer-000.safetensors", "layer-000-000001-0123456789abcdef.safetensors"}
        for name in strangers:
            fs.pipe_file(f"{path}/{name}", b"mine")
        cache, ids = filled(model, make_cache, length=50)
        cache.save_pretrained(url, token_ids=ids, model=model)
        after = names_at(url)
        assert strangers <= after  # the last may be of a save that is under way
        assert (after - strangers) & before == {"manifest.json"}
        assert len(after - strangers) == 4 + 2
        assert torch.equal(next_logits(model, opened(url, model=model)), next_logits(model, cache))

    def test_what_an_interrupted_save_left_goes_after_a_day(self, make_cache):
        _, cache, ids = saved(URL, make_cache)
        fs, path = fsspec.url_to_fs(URL)
        for name in ("layer-000-000001-0123456789abcdef.safetensors", "states-0123456789abcdef.safetensors"):
            fs.pipe_file(f"{path}/{name}", b"left")
        fs.store[f"{path}/states-0123456789abcdef.safetensors"].modified -= timedelta(days=2)
        cache.save_pretrained(URL, token_ids=ids)
        assert {name for name in names_at(URL) if "0123456789abcdef" in name} == {
            "layer-000-000001-0123456789abcdef.safetensors"
        }

    @pytest.mark.parametrize("scheme", ["memory", "s3"])
    def test_names_that_look_like_patterns(self, s3, make_cache, opened, scheme):
        url = f"{scheme}://bucket/run[1]*"
        model, cache, ids = saved(url, make_cache)
        before = names_at(url)
        cache.save_pretrained(url, token_ids=ids, model=model)
        assert names_at(url) & before == {"manifest.json"}
        assert len(names_at(url)) == len(before)
        assert torch.equal(next_logits(model, opened(url, model=model)), next_logits(model, cache))

    def test_no_byte_of_a_shard_is_written_again(self, make_cache, monkeypatch):
        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=0)
        linked, upload = set(), Remote.upload

        def look(self, folder):
            linked.update(path.stat().st_ino for path in folder.glob("layer-*"))
            return upload(self, folder)

        monkeypatch.setattr(Remote, "upload", look)
        cache.save_pretrained(URL, token_ids=ids)
        assert linked == {path.stat().st_ino for path in cache.offload_path.glob("layer-*.safetensors")}

    def test_what_a_killed_save_left_on_the_drive_is_removed(self, tmp_path):
        folder = tmp_path / "nvme-cache-12345-abcdefgh"
        folder.mkdir()
        ending = "0123456789abcdef"
        for name in ("lock", "saving.lock", "in-use.lock", "manifest.json", f"manifest-{ending}.partial"):
            (folder / name).touch()
        for name in (f"states-{ending}.safetensors", f"layer-000-000001-{ending}.safetensors"):
            (folder / name).touch()
        assert remove_orphans(tmp_path) == [folder]
        assert list(tmp_path.iterdir()) == []


def flipped(at):
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class TestDamage:
    @exact_and_int8
    @pytest.mark.parametrize("part", ["keys", "values"])
    @pytest.mark.parametrize("verify", [True, False])
    def test_a_flipped_bit_is_refused(self, make_cache, opened, quantization, part, verify):
        model, _, _ = saved(URL, make_cache)
        ours = opened(URL, model=model, verify=verify)
        shard = shards_of(ours)[-1]
        section = shard.sections[part == "values"][-1]
        change(f"{URL}/{shard._name}", flipped(section.offset + section.nbytes - 1))
        with pytest.raises(ShardCorruptedError, match=rf"{part} of layer 3 in .*{URL}/{shard._name} .*their checksum"):
            next_logits(model, ours)
        assert used_bytes(ours) == sum(
            sum(section.padded_nbytes for section in chain(*each.sections)) for each in shards_of(ours)[:-1]
        )

    @pytest.mark.parametrize("which", ["manifest", "states"])
    @pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
    def test_what_is_read_at_once_is_checked_at_once(self, make_cache, opened, which, how, url=URL):
        model, _, _ = saved(url, make_cache)
        name = next(name for name in names_at(url) if name.startswith(which))
        fs, path = fsspec.url_to_fs(url)
        if how == "gone":
            fs.rm(f"{path}/{name}")
        else:
            change(f"{url}/{name}", flipped(700) if how == "flipped" else lambda content: content[:-1])
        with pytest.raises(SnapshotCorruptedError, match=url):
            opened(url, model=model)

    def test_an_object_that_vanished(self, url, make_cache, opened):
        model, _, _ = saved(url, make_cache)
        ours = opened(url, model=model)
        name = shards_of(ours)[1]._name
        fs, path = fsspec.url_to_fs(url)
        fs.rm(f"{path}/{name}")
        with pytest.raises(ShardCorruptedError, match=f"layer 1 .*there is no {url}/{name}"):
            next_logits(model, ours)

    def test_an_object_that_was_cut_short(self, url, make_cache, opened):
        model, _, _ = saved(url, make_cache)
        ours = opened(url, model=model)
        name = shards_of(ours)[1]._name
        change(f"{url}/{name}", lambda content: content[:-3000])
        with pytest.raises(ShardCorruptedError, match=rf"{url}/{name} are damaged: of [\d,]+ bytes there are"):
            next_logits(model, ours)

    def test_a_snapshot_that_was_saved_again_is_no_longer_there(self, url, make_cache, opened):
        model, cache, ids = saved(url, make_cache)
        ours = opened(url, model=model)
        cache.save_pretrained(url, token_ids=ids, model=model)
        with pytest.raises(ShardCorruptedError, match="If the snapshot was saved again meanwhile, open it again"):
            next_logits(model, ours)

    def test_saved_again_while_it_is_being_opened(self, make_cache, opened, monkeypatch):
        model, cache, ids = saved(URL, make_cache)
        read, left = Remote.read, [1]

        def interfere(self, name, *args):
            if name.startswith("states") and left:
                left.clear()
                cache.save_pretrained(URL, token_ids=ids, model=model)
            return read(self, name, *args)

        monkeypatch.setattr(Remote, "read", interfere)
        assert torch.equal(next_logits(model, opened(URL, model=model)), next_logits(model, cache))

    def test_no_network(self, s3, make_cache, opened, monkeypatch):
        url = f"{s3}/away"
        model, cache, ids = saved(url, make_cache)
        expected = next_logits(model, cache)
        ours = opened(url, model=model)
        call = s3fs.S3FileSystem._call_s3

        async def dead(self, *args, **options):
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", dead)
        with pytest.raises(ShardIOError, match=rf"cannot read {url}/layer-000.*Connection refused.*then call again"):
            next_logits(model, ours)
        assert used_bytes(ours) == 0
        with pytest.raises(SnapshotIOError, match=f"cannot read {url}/manifest.json: .*Connection refused"):
            opened(url, model=model)
        cache.crop(-1)
        with pytest.raises(SnapshotIOError, match=f"{url}.*Connection refused"):
            cache.save_pretrained(url, token_ids=ids, model=model)
        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        assert torch.equal(next_logits(model, ours), expected)

    def test_no_bucket(self, s3, make_cache, opened):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        with pytest.raises(SnapshotIOError, match="s3://nowhere/report"):
            cache.save_pretrained("s3://nowhere/report", token_ids=ids)
        assert not fsspec.filesystem("s3").exists("nowhere")
        with pytest.raises(SnapshotCorruptedError, match="s3://nowhere/report holds no snapshot"):
            opened("s3://nowhere/report", model=model)


class TestBudget:
    def test_downloads_count_before_they_come(self, url, make_cache, opened, requests):
        model, _, _ = saved(url, make_cache)
        one = sum(section.padded_nbytes for section in chain(*shards_of(opened(url, model=model))[0].sections))
        ours = opened(url, model=model, disk_budget=2 * one + 100)
        requests.clear()
        with pytest.raises(StorageFullError, match="would exceed disk_budget"):
            next_logits(model, ours)
        assert sum(name.startswith("layer-") for name, *_ in requests) == 2
        assert used_bytes(ours) == 2 * one
        assert sum(path.stat().st_blocks * 512 for path in ours.offload_path.glob("layer-*")) <= 2 * one + 100

    def test_what_is_dropped_gives_its_bytes_back(self, make_cache, opened):
        model, _, _ = saved(URL, make_cache)
        ours = opened(URL, model=model)
        next_logits(model, ours)
        assert len(list(ours.offload_path.glob("layer-*"))) == 4
        ours.reset()
        assert used_bytes(ours) == 0
        assert list(ours.offload_path.glob("layer-*")) == []

    def test_what_a_save_writes_on_the_way_counts(self, make_cache, offload_dir):
        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=1 << 30, disk_budget=100)
        with pytest.raises(StorageFullError, match="would exceed disk_budget=100"):
            cache.save_pretrained(URL, token_ids=ids)
        assert names_at(URL) == set()
        assert list(offload_dir.iterdir()) == [cache.offload_path]

    def test_it_counts_only_on_the_way(self, make_cache):
        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=1 << 30)
        nbytes = cache.memory_usage()["host"] + cache.memory_usage()["device"]
        other, _ = filled(model, make_cache, host_budget=1 << 30, disk_budget=nbytes)
        for _ in range(2):
            other.save_pretrained(URL, token_ids=ids)
        assert used_bytes(other) == 0


class TestPlaces:
    def test_unknown_protocols(self, make_cache):
        with pytest.raises(ConfigurationError, match=r"cannot serve nonsense://shelf: Protocol not known"):
            place_of("nonsense://shelf")

    def test_a_missing_package_is_named(self, monkeypatch):
        fsspec.register_implementation("unheard", "unheard_of.System", errtxt="Install unheard_of to read unheard://")
        with pytest.raises(ConfigurationError, match="Install unheard_of"):
            place_of("unheard://shelf")

    def test_passwords_are_not_told(self):
        with pytest.raises((ConfigurationError, SnapshotIOError)) as raised:
            place_of(f"ftp://me:top@secret@127.0.0.1:{free_port()}/shelf")
        assert "ftp://127.0.0.1" in str(raised.value)
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize("path", ["report", "/a/b", "c:d", "a/s3://b", Path("s3://bucket")])
    def test_paths_are_paths(self, path):
        assert place_of(path) == Path(path)
