"""What is on the drive: valid safetensors, page-aligned, written once, verified when read back."""

import json
import os
import weakref

import pytest
import torch
from safetensors import safe_open

from nvme_cache import ShardCorruptedError
from nvme_cache.shards import Section, Shard

from .conftest import generate, tiny_model

LAYERS, HEADS, WIDTH = 4, 2, 16


def filled_cache(make_cache, tokens=100, block_size=16, **options):
    """A cache whose layers hold known tokens, all blocks on the drive, and those tokens."""
    cache = make_cache(block_size=block_size, **options)
    states = torch.randn(2, LAYERS, 1, HEADS, tokens, WIDTH)
    for layer_idx in range(LAYERS):
        cache.update(states[0][layer_idx], states[1][layer_idx], layer_idx)
    return cache, states


def one_more_token(cache):
    token = torch.zeros(1, HEADS, 1, WIDTH)
    return [cache.update(token, token, layer_idx) for layer_idx in range(LAYERS)]


def shards_of(cache):
    return sorted(cache.offload_path.glob("*.safetensors"))


def flip(path, offset):
    """Changes a bit of a file on the drive."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("tokens", [16, 100])
@pytest.mark.parametrize("width", [16, 24, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stock_safetensors_opens_every_shard_and_finds_the_tokens(tokens, width, dtype, make_cache):
    cache = make_cache(block_size=16)
    keys, values = torch.randn(2, 1, HEADS, tokens, width).to(dtype)
    cache.update(keys, values[..., : width - 1], 0)
    one = torch.zeros(1, HEADS, 1, width, dtype=dtype)
    cache.update(one, one[..., : width - 1], 0)  # waits for the write
    (path,) = shards_of(cache)
    with safe_open(path, framework="pt") as shard:
        for name, states in (("keys", keys), ("values", values[..., : width - 1])):
            blocks = shard.get_tensor(name)
            assert blocks.shape == (1, 1, HEADS, tokens // 16 * 16, states.shape[3])
            whole = states[:, :, : tokens // 16 * 16]
            assert torch.equal(blocks.permute(1, 2, 0, 3, 4).flatten(2, 3), whole)
        assert shard.metadata()["format"] == "nvme-cache"
        assert shard.metadata()["first_token"] == "0"


def test_data_begins_on_pages_and_the_header_is_padded_with_spaces(make_cache):
    cache, _ = filled_cache(make_cache)
    one_more_token(cache)
    for path in shards_of(cache):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length]
        assert (8 + length) % 4096 == 0
        assert header.endswith(b" ") and header.strip().endswith(b"}") and header.startswith(b"{")
        tensors = json.loads(header)
        assert tensors["keys"]["data_offsets"][0] == 0
        assert tensors["values"]["data_offsets"][0] % 4096 == 0
        assert len(data) % 4096 == 0


def test_everything_sealed_is_written_once_and_lies_on_the_drive(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    seen = []
    forward = model.forward

    def watched(*args, **kwargs):
        seen.append((cache.memory_usage(), len(shards_of(cache))))
        return forward(*args, **kwargs)

    model.forward = watched
    generate(model, cache, 100)
    cache._pager._writer._executor.submit(int).result()  # the one write thread has done all before
    block = HEADS * WIDTH * 4 * 2 * 16
    sealed = LAYERS * block * (cache.get_seq_length() // 16)
    on_drive = 0
    for path in shards_of(cache):
        with safe_open(path, framework="pt") as shard:
            on_drive += sum(shard.get_tensor(name).nbytes for name in ("keys", "values"))
    counters = cache._pager.meter
    assert on_drive == sealed == counters.sealed_bytes == counters.written_bytes == cache.memory_usage()["nvme"]
    assert all(usage["host"] == 0 for usage, _ in seen)
    assert all(usage["device"] <= LAYERS * 2 * block for usage, _ in seen)  # tails alone
    assert any(usage["nvme"] and count for usage, count in seen)


def test_files_are_private(make_cache):
    cache, _ = filled_cache(make_cache)
    one_more_token(cache)
    assert cache.offload_path.stat().st_mode & 0o777 == 0o700
    for path in cache.offload_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("all_cores", [True, False])  # checked by whoever waits, or where it is read
@pytest.mark.parametrize("block_size", [16, 64])  # through staging, and straight into the slot
def test_every_flipped_bit_is_found(block_size, all_cores, make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.pager.takes_all_cores", lambda: all_cores)
    for where in range(4):
        cache, _ = filled_cache(make_cache, tokens=200, block_size=block_size, prefetch_depth=0)
        one_more_token(cache)
        path = shards_of(cache)[1]
        with safe_open(path, framework="pt") as shard:
            shape = shard.get_tensor("keys").shape
        section = Section.of("keys", tuple(shape), torch.float32)
        header = path.stat().st_size - 2 * section.padded_nbytes
        offset = (
            header + [0, section.nbytes - 1, section.padded_nbytes, section.padded_nbytes + section.nbytes - 1][where]
        )
        flip(path, offset)
        with pytest.raises(
            ShardCorruptedError, match=rf"(?s)layer \d+ in shard {path}.*tokens \d+ to \d+ do not match"
        ):
            for _ in range(2):
                one_more_token(cache)


def test_an_interrupted_check_is_made_again(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.pager.takes_all_cores", lambda: True)
    cache, _ = filled_cache(make_cache, tokens=200, block_size=64, prefetch_depth=0)
    one_more_token(cache)
    flip(shards_of(cache)[0], 4096)
    with monkeypatch.context() as interrupted:

        def interrupt(*_):
            raise KeyboardInterrupt

        interrupted.setattr(Shard, "verify", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one_more_token(cache)
    with pytest.raises(ShardCorruptedError, match="layer 0 in shard"):
        one_more_token(cache)


def test_what_is_still_to_be_checked_keeps_no_file(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.pager.takes_all_cores", lambda: True)
    cache, _ = filled_cache(make_cache, tokens=200, block_size=64, prefetch_depth=1)
    one_more_token(cache)
    cache._pager.flush()  # the next token's first layer has been read, and nobody has waited for it
    assert cache.layers[0]._lease.checks
    shard = weakref.ref(cache.layers[0]._history.runs[0].blocks)
    cache.crop(-cache.get_seq_length())
    assert shard() is None


def test_verification_can_be_turned_off(make_cache):
    cache, states = filled_cache(make_cache, verify=False, prefetch_depth=0)
    one_more_token(cache)
    flip(shards_of(cache)[0], 4096)
    keys, _ = one_more_token(cache)[0]
    assert not torch.equal(keys[:, :, :96], states[0][0][:, :, :96])


def test_a_truncated_shard_is_an_error_that_names_it(make_cache):
    cache, _ = filled_cache(make_cache, prefetch_depth=0)
    one_more_token(cache)
    path = shards_of(cache)[0]
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(ShardCorruptedError, match=rf"layer 0 in shard {path} are damaged: the file ends"):
        one_more_token(cache)


def test_a_missing_shard_is_an_error_that_names_it(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.io.open_file_allowance", lambda: 0)  # as with more shards than descriptors
    cache, states = filled_cache(make_cache, prefetch_depth=0)
    assert torch.equal(one_more_token(cache)[3][0][:, :, :100], states[0][3])
    path = shards_of(cache)[0]
    path.unlink()
    with pytest.raises(ShardCorruptedError, match=rf"shard {path} are damaged"):
        one_more_token(cache)


def test_an_unfinished_write_leaves_nothing(tmp_path, monkeypatch):
    sections = tuple((Section.of(name, (1, 1, 1, 16, 16), torch.float32),) for name in ("keys", "values"))
    shard = Shard(tmp_path / "x.safetensors", 0, 0, sections, direct=False)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nvme_cache.io.write_all", fail)
    from nvme_cache.buffers import HostBuffer

    buffers = [HostBuffer(torch.empty(4096, dtype=torch.uint8)) for _ in sections]
    with pytest.raises(OSError, match="No space"):
        shard.write(buffers)
    assert list(tmp_path.iterdir()) == []
