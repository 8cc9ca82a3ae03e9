"""Kills a process again and again while it saves into one folder: python -m tests.kill_saves FOLDER COUNT."""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from nvme_cache import OffloadedNVMeCache

from .conftest import tiny_model

BLOCK_SIZE = 16


def states(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, 2, length, 16, generator=generator) for _ in range(2)] for _ in range(4)]


KINDS = [(1, 70), (2, 55)]
EXPECTED = [states(*kind) for kind in KINDS]


def filled(config, folder, kind):
    cache = OffloadedNVMeCache(
        config=config, block_size=BLOCK_SIZE, offload_dir=folder, host_budget=0, prefetch_depth=2, io_threads=2
    )
    for layer_idx, (keys, values) in enumerate(EXPECTED[kind]):
        cache.update(keys, values, layer_idx)
    return cache


def save(cache, kind, snapshot):
    cache.save_pretrained(snapshot, token_ids=torch.full((1, KINDS[kind][1]), kind))


def kind_of(snapshot, config, folder):
    """Which of the two a snapshot is; raises if it is neither."""
    with OffloadedNVMeCache.from_pretrained(snapshot, config=config, offload_dir=folder) as cache:
        kind = int(cache._prompt.ids[0, 0])
        for layer, (keys, values) in zip(cache.layers, EXPECTED[kind], strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
    return kind


def main(folder, count):
    config, chance = tiny_model().config, random.Random(4)
    snapshot, private = folder / "snapshot", folder / "private"
    private.mkdir()
    with filled(config, private, 0) as cache:
        began = time.perf_counter()
        save(cache, 0, snapshot)
        longest_s = 3 * (time.perf_counter() - began)
    found = []
    for _ in range(count):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            with filled(config, private, 0) as one, filled(config, private, 1) as other:
                os.write(writer, b"ready")
                for cache, kind in itertools.cycle([(one, 0), (other, 1)]):
                    save(cache, kind, snapshot)
        os.read(reader, 5)
        time.sleep(chance.uniform(0, longest_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader), os.close(writer)
        found.append(kind_of(snapshot, config, private))
    assert set(found) == {0, 1}, "no save ever ended, or none was ever interrupted"
    with filled(config, private, 1) as cache:
        save(cache, 1, snapshot)
    assert kind_of(snapshot, config, private) == 1
    assert len(list(snapshot.glob("states-*"))) == 1
    assert not list(snapshot.glob("*.partial"))
    assert list(private.iterdir()) == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
