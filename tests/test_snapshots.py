"""Snapshots: what is saved comes back bit for bit, in other processes too, and nothing else ever does."""

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import DynamicCache

from nvme_cache import (
    CacheMisuseError,
    ConfigurationError,
    NVMeCacheError,
    OffloadedNVMeCache,
    ShardCorruptedError,
    SnapshotCorruptedError,
    SnapshotMismatchError,
)
from nvme_cache.arguments import cache_argument
from nvme_cache.snapshots.identity import digest_of

from .conftest import exact_int8_and_mixed, prompt, tiers, tiny_hybrid, tiny_model, tokens

BLOCK_SIZE = 16
MODELS = {
    "llama": tiny_model,
    "qwen3": lambda: tiny_model("qwen3"),
    "mistral": lambda: tiny_model("mistral"),
    "gemma3": lambda: tiny_model("gemma3"),
    "hybrid": tiny_hybrid,
}


def next_logits(model, cache, token=7, rows=1):
    with torch.no_grad():
        ids = torch.full((rows, 1), token)
        return model(ids, **{cache_argument(model): cache}, use_cache=True).logits


def filled(model, make_cache, length=75, rows=1, **options):
    """A cache that has read a prompt, and the prompt."""
    ids = prompt(length, rows)
    cache = make_cache(config=model.config, **{"block_size": BLOCK_SIZE} | options)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache}, use_cache=True)
    return cache, ids


def contents(folder):
    """What each file of a snapshot holds; locks hold nothing."""
    return {path.name: xxhash.xxh3_64(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def restored(tmp_path_factory):
    """Opens snapshots, with shards of their own in another folder, and closes them."""
    caches = []

    def restore(folder, **options):
        private = tmp_path_factory.mktemp("private")
        caches.append(
            OffloadedNVMeCache.from_pretrained(folder, **{"offload_dir": private, "host_budget": 0} | options)
        )
        return caches[-1]

    yield restore
    for cache in caches:
        cache.close()


class TestRoundTrip:
    @exact_int8_and_mixed
    @pytest.mark.parametrize("tier", tiers(0))
    @pytest.mark.parametrize("kind", MODELS)
    def test_one_more_token_is_the_same_to_the_bit(self, kind, tier, make_cache, tmp_path, restored, quantization):
        model = MODELS[kind]()
        cache, ids = filled(model, make_cache, rows=2, **tiers(3000)[tier])
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids, model=model)
        ours = restored(tmp_path / "snapshot", model=model)
        assert ours.get_seq_length() == cache.get_seq_length()
        for token in (7, 8, 9):
            assert torch.equal(next_logits(model, ours, token, 2), next_logits(model, cache, token, 2))

    def test_what_is_generated_after_it_is_what_one_cache_would(self, make_cache, tmp_path, restored):
        model, ids = tiny_model(), prompt(75)
        whole = tokens(model, ids, DynamicCache(config=model.config), max_new_tokens=60)
        cache = make_cache(config=model.config, block_size=BLOCK_SIZE)
        first = tokens(model, ids, cache, max_new_tokens=30)
        cache.save_pretrained(tmp_path / "snapshot", model=model)  # it knows the tokens from `generate`
        ours = restored(tmp_path / "snapshot", model=model)
        assert torch.equal(tokens(model, first, ours, max_new_tokens=30), whole)

    def test_another_prompt_is_refused_as_on_any_filled_cache(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        other = ids.clone()
        other[0, 3] += 1
        ours = restored(tmp_path / "snapshot", config=model.config)
        with pytest.raises(NVMeCacheError, match="another prompt"):
            tokens(model, torch.cat([other, ids], 1), ours)

    @pytest.mark.parametrize("quantization", [None, "int4"])
    def test_beams_and_crops_come_back_as_indices(self, make_cache, tmp_path, restored, quantization):
        model = tiny_model()
        cache, ids = filled(model, make_cache, rows=3)
        cache.crop(-20)
        cache.batch_select_indices(torch.tensor([2, 0, 0, 1]))
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids[[2, 0, 0, 1]])
        ours = restored(tmp_path / "snapshot", config=model.config)
        assert ours.get_seq_length() == 55
        assert torch.equal(next_logits(model, ours, rows=4), next_logits(model, cache, rows=4))

    def test_a_snapshot_of_a_snapshot(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "first", token_ids=ids, model=model)
        second = restored(tmp_path / "first", model=model)
        longer = tokens(model, ids, second, max_new_tokens=30)
        second.save_pretrained(tmp_path / "second", model=model)
        third = restored(tmp_path / "second", model=model)
        rest = tokens(model, longer, third, max_new_tokens=10)
        assert torch.equal(rest, tokens(model, ids, DynamicCache(config=model.config), max_new_tokens=40))

    def test_saving_again_into_the_same_folder_replaces_it(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        folder = tmp_path / "snapshot"
        cache.save_pretrained(folder, token_ids=ids, model=model)
        ours = restored(folder, model=model)
        longer = tokens(model, ids, ours, max_new_tokens=40)
        ours.save_pretrained(folder, model=model)
        expected = next_logits(model, ours)
        assert torch.equal(next_logits(model, restored(folder, model=model)), expected)
        assert len(list(folder.glob("states-*"))) == 1
        known = {path.name for path in folder.glob("*.safetensors")}
        ours.save_pretrained(folder, token_ids=torch.cat([longer[:, :-1], torch.tensor([[7]])], 1), model=model)
        shards = {name for name in known if name.startswith("layer")}
        assert shards <= {path.name for path in folder.iterdir()}  # not written or linked again

    def test_an_old_snapshot_stays_whole_while_it_is_open(self, make_cache, tmp_path, restored):
        model, folder = tiny_model(), tmp_path / "snapshot"
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(folder, token_ids=ids, model=model)
        ours, expected = restored(folder, model=model), next_logits(model, cache)
        other, other_ids = filled(model, make_cache, length=50)
        other.save_pretrained(folder, token_ids=other_ids, model=model)  # before `ours` has read a block
        assert torch.equal(next_logits(model, ours), expected)
        ours.close()
        del ours
        other.save_pretrained(folder, token_ids=other_ids, model=model)
        named = json.loads((folder / "manifest.json").read_text())
        files = {run["file"] for layer in named["layers"] for run in layer["paged"]["runs"]}
        assert {path.name for path in folder.glob("layer-*")} == files

    def test_nothing_is_written_to_the_snapshot_that_is_open(self, make_cache, tmp_path, restored):
        model, folder = tiny_model(), tmp_path / "snapshot"
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(folder, token_ids=ids, model=model)
        before = contents(folder)
        ours = [restored(folder, model=model) for _ in range(2)]
        for each in ours:
            tokens(model, ids, each, max_new_tokens=50)
            each.reorder_cache(torch.tensor([0]))
            each.crop(-60)
            each.close()
        assert contents(folder) == before | {"in-use.lock": xxhash.xxh3_64(b"").hexdigest()}

    def test_what_is_on_the_drive_is_linked(self, make_cache, tmp_path):
        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=0)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        own = {path.stat().st_ino for path in cache.offload_path.glob("layer-*.safetensors")}
        assert own
        assert {path.stat().st_ino for path in (tmp_path / "snapshot").glob("layer-*")} == own

    def test_files_are_for_their_owner_alone_and_any_reader_opens_them(self, make_cache, tmp_path):
        model, folder = tiny_model(), tmp_path / "snapshot"
        cache, ids = filled(model, make_cache, host_budget=1 << 20)
        cache.save_pretrained(folder, token_ids=ids)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())

    def test_where_links_cannot_be_bytes_are_copied(self, make_cache, tmp_path, restored, monkeypatch):
        def refuse(*_):
            raise OSError(18, "Invalid cross-device link")

        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=0)
        monkeypatch.setattr("os.link", refuse)
        cache.save_pretrained(tmp_path / "copied", token_ids=ids)
        monkeypatch.setattr("os.copy_file_range", refuse)
        cache.save_pretrained(tmp_path / "by hand", token_ids=ids)
        expected = next_logits(model, cache)
        for name in ("copied", "by hand"):
            assert torch.equal(next_logits(model, restored(tmp_path / name, config=model.config)), expected)

    def test_a_closed_cache_leaves_the_snapshot_whole(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache, host_budget=0)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        expected = next_logits(model, cache)
        cache.reset()
        filled(model, lambda **_: cache, length=100)  # overwrites what is free
        cache.close()
        assert torch.equal(next_logits(model, restored(tmp_path / "snapshot", config=model.config)), expected)


class TestWarm:
    """What the host budget has room for is read once and stays."""

    @exact_int8_and_mixed
    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    def test_blocks_within_the_budget_are_read_once(self, share, make_cache, tmp_path, restored, quantization):
        model = tiny_model()
        cache, ids = filled(model, make_cache, length=40)
        ids = tokens(model, ids, cache, max_new_tokens=64)  # one shard a block
        cache.save_pretrained(tmp_path / "snapshot", model=model)
        sealed = cache.memory_usage()["nvme"]
        ours = restored(tmp_path / "snapshot", model=model, host_budget=round(share * sealed))
        usage, meter = ours.memory_usage(), ours._pager.meter
        assert usage["host"] + usage["nvme"] == sealed
        assert 0 <= share * sealed - usage["host"] <= 0.2 * sealed
        for step in range(3):
            before = meter.read_bytes
            assert torch.equal(next_logits(model, ours, step), next_logits(model, cache, step))
            if step == 1:  # quantized layers that seal are fetched twice
                assert meter.read_bytes - before <= 2 * usage["nvme"]
        fork = ours.fork()
        assert torch.equal(next_logits(model, fork), next_logits(model, ours))
        fork.close()
        ours.save_pretrained(tmp_path / "again", token_ids=torch.cat([ids[:, :-1], ids[:, :4]], dim=1))
        expected = next_logits(model, ours, 9)
        assert torch.equal(next_logits(model, restored(tmp_path / "again", config=model.config), 9), expected)

    def test_a_damaged_block_is_refused_however_often_it_is_asked_for(self, snapshot, tmp_path, restored):
        model, folder, _ = snapshot
        folder = copied(folder, tmp_path / "copy")
        path = sorted(folder.glob("layer-*"))[-1]
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
        ours = restored(folder, config=model.config, host_budget=1 << 30)
        for _ in range(2):
            with pytest.raises(ShardCorruptedError, match="This snapshot is of no more use"):
                next_logits(model, ours)


def test_what_a_token_took_is_told_from_all_that_were_computed(make_cache, tmp_path, restored):
    """A turn of a few tokens behind many says little of what computing them all again would take."""
    model = tiny_model()
    cache, ids = filled(model, make_cache, length=100)
    cache.save_pretrained(tmp_path / "snapshot", token_ids=ids, model=model)
    first = json.loads((tmp_path / "snapshot" / "manifest.json").read_text())["prefill_token_s"]
    assert first > 0
    ours = restored(tmp_path / "snapshot", model=model)
    tokens(model, torch.cat([ids, ids[:, :5]], dim=1), ours, max_new_tokens=2)
    steps = [step for step in ours._pager.meter.steps if step.is_prefill]
    ours.save_pretrained(tmp_path / "longer", model=model)
    second = json.loads((tmp_path / "longer" / "manifest.json").read_text())["prefill_token_s"]
    assert second == pytest.approx((100 * first + steps[0].wall_s) / 105)


class TestFreshProcess:
    def test_one_more_token_in_another_process(self, make_cache, tmp_path):
        model = tiny_model("gemma3")
        cache, ids = filled(model, make_cache, rows=2)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids, model=model)
        torch.save(next_logits(model, cache, rows=2), tmp_path / "logits")
        program = f"""
import torch
from nvme_cache import OffloadedNVMeCache
from tests.conftest import tiny_model
from tests.test_snapshots import next_logits
folder, model = {str(tmp_path)!r}, tiny_model("gemma3")
with OffloadedNVMeCache.from_pretrained(folder + "/snapshot", model=model, offload_dir=folder) as cache:
    assert torch.equal(next_logits(model, cache, rows=2), torch.load(folder + "/logits"))
"""
        subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)


class TestFork:
    @exact_int8_and_mixed
    def test_forks_go_their_own_ways(self, make_cache, quantization):
        model = tiny_model("gemma3")
        cache, _ = filled(model, make_cache, host_budget=0)
        cache._pager.flush()
        before = {path.name: path.stat().st_ino for path in cache.offload_path.glob("layer-*")}
        forks = [cache.fork() for _ in range(3)]
        assert {path.name: path.stat().st_ino for path in cache.offload_path.glob("layer-*")} == before
        expected = [next_logits(model, cache.fork(), token) for token in range(3)]
        cache.close()
        for token, fork in enumerate(forks):
            assert torch.equal(next_logits(model, fork, token), expected[token])
        folder = forks[0].offload_path
        for fork in forks:
            assert folder.exists()
            fork.close()

    @pytest.mark.parametrize("kind", ["llama", "gemma3", "hybrid"])
    def test_ten_forks_at_once_are_ten_deep_copies(self, kind, make_cache):
        model, ids = MODELS[kind](), prompt(75)
        cache, stock = filled(model, make_cache)[0], DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, **{cache_argument(model): stock}, use_cache=True)
        turns = [torch.cat([ids, prompt(75 + n)[:, 70:]], dim=1) for n in range(10)]
        expected = [tokens(model, turn, copy.deepcopy(stock), max_new_tokens=12) for turn in turns]

        def go_on(turn):
            with cache.fork() as fork:
                return tokens(model, turn, fork, max_new_tokens=12)

        before = {path.name for path in cache.offload_path.iterdir()}
        with ThreadPoolExecutor(10) as pool:
            assert all(map(torch.equal, pool.map(go_on, turns), expected))
        left = {path.name for path in cache.offload_path.iterdir()} - before
        assert all(name.endswith(".free") for name in left)


class TestMismatch:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rope_theta": 5e5}, "rope"),
            ({"rms_norm_eps": 1e-3}, r"config.rms_norm_eps is 1e-06 there and 0.001 here"),
            ({"num_key_value_heads": 4}, "config.num_key_value_heads is 2 there and 4 here"),
            ({"num_hidden_layers": 3}, "config.num_hidden_layers is 4 there and 3 here"),
            ({"vocab_size": 300}, "config.vocab_size"),
        ],
    )
    def test_another_config(self, make_cache, tmp_path, restored, change, message):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        with pytest.raises(SnapshotMismatchError, match=message):
            restored(tmp_path / "snapshot", config=tiny_model(**change).config)

    def test_another_family(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        with pytest.raises(SnapshotMismatchError, match="model_type is 'llama' there and 'qwen3' here"):
            restored(tmp_path / "snapshot", config=tiny_model("qwen3").config)

    def test_other_weights(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids, model=model)
        with torch.no_grad():
            model.model.layers[2].self_attn.k_proj.weight.mul_(1.01)
        with pytest.raises(SnapshotMismatchError, match="weights is "):
            restored(tmp_path / "snapshot", model=model)

    def test_another_dtype(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids, model=model)
        with pytest.raises(SnapshotMismatchError, match="dtype is 'float32' there and 'bfloat16' here"):
            restored(tmp_path / "snapshot", model=tiny_model(dtype=torch.bfloat16))

    def test_another_release_of_transformers(self, make_cache, tmp_path, restored, monkeypatch):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        monkeypatch.setattr("transformers.__version__", "5.1.3")
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        monkeypatch.setattr("transformers.__version__", "5.1.4")
        restored(tmp_path / "snapshot", config=model.config)
        monkeypatch.setattr("transformers.__version__", "5.2.0")
        with pytest.raises(SnapshotMismatchError, match=r"transformers is '5\.1' there and '5\.2' here"):
            restored(tmp_path / "snapshot", config=model.config)

    def test_other_layer_kinds(self, make_cache, tmp_path, restored):
        model = tiny_model("mistral")
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        edit(tmp_path / "snapshot", lambda manifest: manifest["layers"][1].update(kind="NVMeLayer", state=None))
        with pytest.raises(SnapshotMismatchError, match=r"layer 1 in .* is of kind NVMeLayer"):
            restored(tmp_path / "snapshot", config=model.config)

    def test_another_version_of_the_format(self, make_cache, tmp_path, restored):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        edit(tmp_path / "snapshot", lambda manifest: manifest.update(version=2))
        with pytest.raises(SnapshotMismatchError, match="version 2 of the format"):
            restored(tmp_path / "snapshot", config=model.config)


class TestArguments:
    def test_tokens_must_be_known(self, make_cache, tmp_path):
        model = tiny_model()
        cache, ids = filled(model, make_cache)
        for wrong in (None, ids[:, :40], ids.expand(2, -1)):
            with pytest.raises(ConfigurationError, match="the cache holds 1 x 75 tokens"):
                cache.save_pretrained(tmp_path / "snapshot", token_ids=wrong)
        assert not (tmp_path / "snapshot").exists()

    def test_there_must_be_something_to_save(self, make_cache, tmp_path):
        with pytest.raises(ConfigurationError, match="holds no tokens"):
            make_cache(config=tiny_model().config).save_pretrained(tmp_path / "snapshot", token_ids=prompt(3))

    def test_a_model_must_be_known(self, make_cache, tmp_path, restored):
        model, ids = tiny_model(), prompt(75)
        cache = make_cache(block_size=BLOCK_SIZE)
        first = tokens(model, ids, cache)
        with pytest.raises(ConfigurationError, match="needs save_pretrained"):
            cache.save_pretrained(tmp_path / "snapshot")
        cache.save_pretrained(tmp_path / "snapshot", model=model)
        with pytest.raises(ConfigurationError, match="needs config"):
            restored(tmp_path / "snapshot")
        with pytest.raises(ConfigurationError, match="its own block_size"):
            restored(tmp_path / "snapshot", config=model.config, block_size=3)
        again = tokens(model, first, restored(tmp_path / "snapshot", model=model), max_new_tokens=4)
        assert torch.equal(again, tokens(model, ids, DynamicCache(config=model.config), max_new_tokens=28))

    def test_no_folder_no_snapshot(self, tmp_path, restored):
        config = tiny_model().config
        with pytest.raises(SnapshotCorruptedError, match="no such folder"):
            restored(tmp_path / "nowhere", config=config)
        with pytest.raises(SnapshotCorruptedError, match="holds no snapshot"):
            restored(tmp_path, config=config)


def edit(folder, change):
    """Changes the manifest of a snapshot as someone would who means it: with a checksum that fits."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["xxh3"]
    change(manifest)
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**manifest, "xxh3": xxhash.xxh3_128(canonical.encode()).hexdigest()}))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A snapshot with blocks, tails and sliding windows, and what one more token gives."""
    model, ids = tiny_model("gemma3"), prompt(75)
    folder = tmp_path_factory.mktemp("hostile") / "snapshot"
    private = tmp_path_factory.mktemp("private")
    with OffloadedNVMeCache(config=model.config, block_size=BLOCK_SIZE, offload_dir=private, host_budget=0) as cache:
        with torch.no_grad():
            model(ids, **{cache_argument(model): cache}, use_cache=True)
        cache.save_pretrained(folder, token_ids=ids)
        return model, folder, next_logits(model, cache)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 100) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def copied(folder, target):
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def first_run(manifest):
    return next(layer["paged"]["runs"][0] for layer in manifest["layers"] if layer["paged"])


class TestHostile:
    @pytest.mark.parametrize("which", ["layer-*", "states-*", "manifest.json"])
    @pytest.mark.parametrize("how", ["flip", "cut", "empty", "grow", "link", "folder", "pipe", "missing"])
    def test_a_damaged_file_is_refused(self, snapshot, tmp_path, restored, which, how):
        model, folder, _ = snapshot
        folder = copied(folder, tmp_path / "copy")
        path = sorted(folder.glob(which))[0]
        content = path.read_bytes()
        path.unlink()
        if how == "flip":
            path.write_bytes(content[:-300] + bytes([content[-300] ^ 1]) + content[-299:])
        elif how in ("cut", "empty", "grow"):
            path.write_bytes({"cut": content[:-1], "empty": b"", "grow": content + b"\0"}[how])
        elif how == "link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        with pytest.raises((SnapshotCorruptedError, ShardCorruptedError)):
            next_logits(model, restored(folder, config=model.config))

    def test_exchanged_shards_are_refused(self, snapshot, tmp_path, restored):
        model, folder, _ = snapshot
        folder = copied(folder, tmp_path / "copy")
        first, *_, last = sorted(folder.glob("layer-*"))
        first.rename(folder / "other")
        last.rename(first)
        (folder / "other").rename(last)
        with pytest.raises(ShardCorruptedError, match="do not match their checksum"):
            next_logits(model, restored(folder, config=model.config))

    @pytest.mark.parametrize("verify", [True, False])
    def test_the_first_read_is_checked_in_any_case(self, snapshot, tmp_path, restored, verify):
        model, folder, _ = snapshot
        folder = copied(folder, tmp_path / "copy")
        path = sorted(folder.glob("layer-*"))[0]
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
        with pytest.raises(ShardCorruptedError, match="This snapshot is of no more use"):
            next_logits(model, restored(folder, config=model.config, verify=verify))

    @pytest.mark.parametrize(
        "change",
        [
            lambda manifest: first_run(manifest).update(file="../../etc/passwd"),
            lambda manifest: first_run(manifest).update(file="/etc/passwd"),
            lambda manifest: first_run(manifest).update(file="layer-000-000001-0123456789abcdef.safetensors/../x"),
            lambda manifest: manifest["states"].update(file="manifest.json"),
            lambda manifest: first_run(manifest).update(num_pieces=10**12),
            lambda manifest: first_run(manifest).update(piece_length=10**15),
            lambda manifest: first_run(manifest).update(length=10**6),
            lambda manifest: first_run(manifest).update(length=-1),
            lambda manifest: first_run(manifest).update(rows=[5]),
            lambda manifest: first_run(manifest).update(rows=[0, 0]),
            lambda manifest: first_run(manifest).update(quantized=True),
            lambda manifest: first_run(manifest).update(file=None),
            lambda manifest: first_run(manifest).update(nbytes=1 << 60),
            lambda manifest: first_run(manifest)["keys"].update(dtype="F16"),
            lambda manifest: first_run(manifest)["keys"].update(dtype="object"),
            lambda manifest: first_run(manifest)["keys"].update(num_heads=1 << 40),
            lambda manifest: first_run(manifest).update(checksums={}),
            lambda manifest: first_run(manifest).update(checksums={"keys": "xyz", "values": ""}),
            lambda manifest: manifest.update(block_size=0),
            lambda manifest: manifest.update(block_size="16"),
            lambda manifest: manifest.update(num_tokens=10**9),
            lambda manifest: manifest.update(quantization={"key": "int99"}),
            lambda manifest: manifest.update(quantization={"surprise": 1}),
            lambda manifest: manifest.update(layers=[]),
            lambda manifest: manifest.update(layers=manifest["layers"][:3]),
            lambda manifest: manifest.update(layers=manifest["layers"] * 100),
            lambda manifest: manifest.update(surprise=1),
            lambda manifest: manifest.pop("model"),
            lambda manifest: manifest["layers"][0]["state"].update(update={"value": 1}),
            lambda manifest: manifest["layers"][0]["state"].update(__class__={"value": 1}),
            lambda manifest: manifest["layers"][0]["state"].update(keys={"tensor": "missing"}),
            lambda manifest: manifest["layers"][0]["state"].update(keys={"dtype": "Tensor"}),
            lambda manifest: manifest["layers"][0]["state"].update(keys={"call": "os.system"}),
            lambda manifest: manifest["layers"][0].update(state=7),
        ],
    )
    def test_an_edited_manifest_is_refused(self, snapshot, tmp_path, restored, change):
        model, folder, _ = snapshot
        folder = copied(folder, tmp_path / "copy")
        text = (folder / "manifest.json").read_text()
        edit(folder, change)
        edited = json.loads((folder / "manifest.json").read_text())
        with pytest.raises((SnapshotCorruptedError, SnapshotMismatchError)):
            restored(folder, config=model.config)
        # As it would be without the right checksum.
        (folder / "manifest.json").write_text(json.dumps({**edited, "xxh3": json.loads(text)["xxh3"]}))
        with pytest.raises(SnapshotCorruptedError, match="not what was written"):
            restored(folder, config=model.config)

    @settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_no_change_to_any_byte_goes_unnoticed(self, snapshot, tmp_path_factory, data):
        """A snapshot with some bytes changed is refused, or the bytes were none that mean anything."""
        model, folder, expected = snapshot
        private = tmp_path_factory.getbasetemp() / "fuzz"
        private.mkdir(exist_ok=True)
        name = data.draw(st.sampled_from(sorted(path.name for path in folder.glob("*.*") if "lock" not in path.name)))
        original = (folder / name).read_bytes()
        changed = bytearray(original)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(changed)))
            if data.draw(st.booleans()):
                changed[at : at + 1] = data.draw(st.binary(min_size=1, max_size=2))
            else:
                del changed[at : at + data.draw(st.integers(1, 5000))]
        try:
            (folder / name).write_bytes(changed)
            with OffloadedNVMeCache.from_pretrained(folder, config=model.config, offload_dir=private) as cache:
                assert torch.equal(next_logits(model, cache), expected)
        except (SnapshotCorruptedError, SnapshotMismatchError, ShardCorruptedError):
            pass
        finally:
            (folder / name).write_bytes(original)

    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_whatever_a_manifest_says_the_error_is_ours(self, snapshot, tmp_path_factory, data):
        """Fields exchanged for anything else, with a checksum that fits: no error but ours, whatever opens."""
        model, folder, _ = snapshot
        private = tmp_path_factory.getbasetemp() / "fuzz"
        private.mkdir(exist_ok=True)
        original = (folder / "manifest.json").read_bytes()

        def change(manifest):
            place = manifest
            while True:
                inner = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = data.draw(st.sampled_from(inner)) if inner else None
                if key is None or not isinstance(place[key], (dict, list)) or data.draw(st.integers(0, 4)) == 0:
                    break
                place = place[key]
            if key is not None:
                place[key] = data.draw(ANYTHING)

        try:
            edit(folder, change)
            OffloadedNVMeCache.from_pretrained(folder, config=model.config, offload_dir=private).close()
        except NVMeCacheError:
            pass
        finally:
            (folder / "manifest.json").write_bytes(original)


def test_a_save_that_is_killed_leaves_the_old_snapshot_or_the_new_one(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.kill_saves", str(tmp_path), "200"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert run.returncode == 0, run.stderr[-3000:]


class TestInterrupted:
    @pytest.fixture
    def broken(self, make_cache):
        """A cache whose first forward never reached its upper layers."""
        model = tiny_model()
        cache = make_cache(config=model.config, block_size=BLOCK_SIZE)

        def stop(*_):
            raise InterruptedError

        handle = model.model.layers[1].register_forward_hook(stop)
        with pytest.raises(InterruptedError):
            model.generate(prompt(70), **{cache_argument(model): cache}, max_new_tokens=2)
        handle.remove()
        return model, cache

    def test_half_a_prompt_is_not_saved(self, broken, tmp_path):
        model, cache = broken
        with pytest.raises(CacheMisuseError, match="first forward was interrupted"):
            cache.save_pretrained(tmp_path / "snapshot", model=model)
        assert not (tmp_path / "snapshot").exists()

    def test_a_fork_of_half_a_prompt_is_refused_as_the_cache_itself_is(self, broken):
        model, cache = broken
        with cache.fork() as fork, pytest.raises(CacheMisuseError, match="first forward was interrupted"):
            next_logits(model, fork)

    def test_a_save_that_fails_leaves_no_files(self, make_cache, tmp_path, monkeypatch):
        model = tiny_model()
        cache, ids = filled(model, make_cache)

        def full(_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("nvme_cache.snapshots.save.sync", full)
            with pytest.raises(OSError, match="No space"):
                cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
        assert set(contents(tmp_path / "snapshot")) == {"saving.lock"}


@pytest.mark.parametrize("name", ["save", "fork", "crop"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["generate", "forward"])
def test_a_thread_that_computes_is_not_disturbed_by_others(name, by_hand, make_cache, tmp_path):
    model, refused = tiny_model(), []
    cache, ids = filled(model, make_cache)
    others = {
        "save": lambda: cache.save_pretrained(tmp_path / "snapshot", token_ids=ids),
        "fork": cache.fork,
        "crop": lambda: cache.crop(-1),
    }

    def disturb(*_):
        def run():
            try:
                others[name]()
            except CacheMisuseError as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    stock = DynamicCache(config=model.config)
    model(ids, **{cache_argument(model): stock}, use_cache=True)
    expected = next_logits(model, stock), next_logits(model, stock)
    model.model.layers[1].register_forward_hook(disturb)
    if by_hand:
        assert torch.equal(next_logits(model, cache), expected[0])
        assert torch.equal(next_logits(model, cache), expected[1])
    else:
        longer = torch.cat([ids, torch.full((1, 1), 7)], dim=1)
        model.generate(longer, **{cache_argument(model): cache}, max_new_tokens=3)
    assert refused and all("in use by another thread" in each for each in refused)


@pytest.mark.parametrize("kind", ["absolute", "relative", "link"])
def test_going_on_in_the_same_folder_leaves_nothing_of_the_past(kind, make_cache, offload_dir, tmp_path, monkeypatch):
    model = tiny_model()
    cache, ids = filled(model, make_cache)
    cache.save_pretrained(tmp_path / "snapshot", token_ids=ids)
    cache.close()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("snapshot")
    folder = {"absolute": tmp_path / "snapshot", "relative": "snapshot", "link": "link"}[kind]
    for length in (40, 33, 60):
        options = {"offload_dir": offload_dir, "host_budget": 0}
        with OffloadedNVMeCache.from_pretrained(folder, model=model, **options) as cache:
            cache.crop(20 - cache.get_seq_length())
            longer = torch.cat([ids[:, :20], prompt(length)], dim=1)
            model.generate(longer, **{cache_argument(model): cache}, max_new_tokens=1)
            cache.save_pretrained(folder, model=model)
        del cache
        manifest = json.loads((tmp_path / "snapshot" / "manifest.json").read_text())
        named = {run["file"] for layer in manifest["layers"] for run in layer["paged"]["runs"]}
        found = {path.name for path in (tmp_path / "snapshot").glob("*.safetensors")}
        assert found == named | {manifest["states"]["file"]}


def test_adapters_and_buffers_are_weights():
    class Adapted(torch.nn.Module):
        disable_adapters = False
        active_adapters = ("first",)

    model = tiny_model()
    model.adapted = Adapted()
    model.register_buffer("codes", torch.zeros(3))
    digests = [digest_of(model)]
    model.adapted.active_adapters = ("second",)
    digests.append(digest_of(model))
    model.adapted.disable_adapters = True
    digests.append(digest_of(model))
    model.codes[1] = 1
    digests.append(digest_of(model))
    assert len(set(digests)) == len(digests)


def test_a_tail_with_sinks_in_it_can_be_opened_again(make_cache, tmp_path):
    """As long as a tail gets: sinks that are due, a block less a token, and an update of as many."""
    config = tiny_model(num_hidden_layers=1).config
    cache = make_cache(config=config, block_size=16, quantization="int8")
    states = [torch.randn(2, 1, 2, length, 16) for length in (19, 15)]
    for part in states:
        cache.update(*part, 0)
    cache.save_pretrained(tmp_path / "saved", token_ids=torch.ones(1, 34, dtype=torch.long))
    options = {"config": config, "offload_dir": cache.offload_path.parent}
    with OffloadedNVMeCache.from_pretrained(tmp_path / "saved", **options) as opened:
        assert torch.equal(opened.layers[0].keys, torch.cat([part[0] for part in states], dim=2))


def test_the_first_forward_on_a_snapshot_may_be_interrupted(make_cache, tmp_path):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    with torch.no_grad():
        model(prompt(50), **{cache_argument(model): cache})
        cache.save_pretrained(tmp_path / "saved", model=model, token_ids=prompt(50))
        expected = model(prompt(1), **{cache_argument(model): cache}).logits

        def interrupt(*_):
            raise KeyboardInterrupt

        with OffloadedNVMeCache.from_pretrained(
            tmp_path / "saved", model=model, offload_dir=cache.offload_path.parent
        ) as opened:
            hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(prompt(1), **{cache_argument(model): opened})
            hook.remove()
            with pytest.raises(CacheMisuseError, match="interrupted"):
                model(prompt(1), **{cache_argument(model): opened})
            assert [layer.get_seq_length() for layer in opened.layers] == [50] * 4
            assert torch.equal(model(prompt(1), **{cache_argument(model): opened}).logits, expected)
