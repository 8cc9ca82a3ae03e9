"""Writes that the drive refuses: kept, said once, tried again; nothing lost, nothing hanging."""

import threading

import pytest
import torch

from nvme_cache import ShardIOError, StorageFullError, io
from nvme_cache.spill import Writer


def test_a_full_drive_says_so_once_and_the_write_is_tried_again(make_cache, monkeypatch):
    cache = make_cache(block_size=16)
    states = torch.randn(2, 1, 2, 64, 16)
    write_all, full, may_fail = io.write_all, [True], threading.Event()

    def maybe(*arguments):
        may_fail.wait()
        if full[0]:
            raise OSError(28, "No space left on device")
        write_all(*arguments)

    monkeypatch.setattr(io, "write_all", maybe)
    for layer_idx in range(2):
        cache.update(*states, layer_idx)
    may_fail.set()
    cache._pager.flush()
    full[0] = False
    token = torch.zeros(2, 1, 2, 1, 16)
    errors = []
    for _ in range(4):
        try:
            for layer_idx in range(2):
                keys, _ = cache.update(*token, layer_idx)
        except StorageFullError as error:
            errors.append(str(error))
    assert len(errors) == 1  # for two shards and the fetches that waited for them
    assert "no room for shard" in errors[0] and "Nothing is lost" in errors[0]
    assert torch.equal(keys[:, :, :64], states[0])
    assert keys.shape[2] == 67


def test_an_interrupt_while_writes_are_tried_again_neither_loses_nor_repeats_any(make_cache, monkeypatch):
    cache = make_cache(block_size=16)
    states = torch.randn(3, 2, 1, 2, 64, 16)
    may_fail = threading.Event()  # not before both are on their way
    with monkeypatch.context() as full_drive:

        def fail(*_):
            may_fail.wait()
            raise OSError(28, "No space left on device")

        full_drive.setattr("nvme_cache.io.write_all", fail)
        for layer_idx in range(2):
            cache.update(*states[layer_idx], layer_idx)
        may_fail.set()
        cache._pager.flush()
    written, submit = [], Writer.submit

    def interrupted(writer, write):
        if written:
            raise KeyboardInterrupt
        written.append(write)
        submit(writer, write)
        write.shard.written.result()  # well written, and its buffers given back

    with monkeypatch.context() as interrupt:
        interrupt.setattr(Writer, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache._pager.check()
    with pytest.raises(StorageFullError):  # of the one that was not given again
        cache._pager.check()
    cache.update(*states[2], 2)  # through the same buffers
    cache._pager.flush()
    assert cache._pager.meter.written_bytes == cache._pager.meter.sealed_bytes
    for layer_idx in range(3):
        assert torch.equal(cache.layers[layer_idx].keys, states[layer_idx][0])
        assert torch.equal(cache.layers[layer_idx].values, states[layer_idx][1])


def test_a_full_drive_never_hangs_a_prompt_that_waits_for_buffers(make_cache, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    cache = make_cache(block_size=16)
    monkeypatch.setattr("nvme_cache.io.write_all", fail)
    with pytest.raises(StorageFullError):
        for layer_idx in range(50):
            cache.update(*torch.randn(2, 1, 2, 64, 16), layer_idx)


def test_any_failure_of_the_write_thread_is_typed_and_hangs_nothing(make_cache, monkeypatch):
    def fail(*_):
        raise MemoryError("no memory for a header")

    cache = make_cache(block_size=16)
    monkeypatch.setattr("nvme_cache.io.write_all", fail)
    with pytest.raises(ShardIOError, match="no memory for a header"):
        for layer_idx in range(50):
            cache.update(*torch.randn(2, 1, 2, 64, 16), layer_idx)
