"""One test for each way in which memory could be used while something else still does."""

import gc
import time
from concurrent.futures import Future

import pytest
import torch
from transformers import DynamicCache

from nvme_cache import OffloadedNVMeCache, QuantizationConfig, segments
from nvme_cache.shards import Shard
from tests.conftest import Attention, Pair, assert_same, generate, tiers, tiny_model

from .executor import HazardError, late

HEADS, WIDTH = 2, 16
TIERS = tiers(mixed_bytes=9000)


def states_of(length, batch_size=1):
    return torch.randn(2, batch_size, HEADS, length, WIDTH)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 2, 5])
@pytest.mark.parametrize("tier", TIERS)
def test_prompt_and_decoding(tier, prefetch_depth, make_cache, adversary):
    pair = Pair(make_cache(block_size=16, prefetch_depth=prefetch_depth, **TIERS[tier]))
    for length in (100, 1, 1, 40, *[1] * 40):
        pair.forward(length)
    assert adversary.copies > 50
    assert (adversary.crossings > 0) == (tier != "device")


QUANTIZATIONS = ["int8", "int4", QuantizationConfig(key="int8", value="int4", sink_tokens=20)]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_quantized_blocks(tier, make_cache):
    pair = Pair(make_cache(block_size=16, **TIERS[tier]))
    for length in (100, 1, 1, 40, *[1] * 40):
        pair.forward(length)
    for cut in (3, 30, 90):
        pair.ours.crop(-cut)
        pair.stock.crop(-cut)
        pair.forward(20)
        pair.forward(1)


def test_staging_buffers_serve_many_shards_each_fetch(make_cache):
    pair = Pair(make_cache(block_size=16))
    for _ in range(12):
        pair.forward(32)  # a shard of its own each time, many more than there are staging buffers
    for _ in range(3):
        pair.forward(1)


@pytest.mark.parametrize("tier", TIERS)
def test_prompts_dropped_at_once_are_sealed_whole(tier, make_cache):
    cache = make_cache(block_size=16, **TIERS[tier])
    kept = []
    for layer_idx in range(4):
        new = states_of(64)
        kept.append(new.clone())
        cache.update(*new, layer_idx)
        del new
        torch.full((2, 1, HEADS, 64, WIDTH), 7.0)
    for layer_idx, expected in enumerate(kept):
        assert torch.equal(cache.layers[layer_idx].keys, expected[0])
        assert torch.equal(cache.layers[layer_idx].values, expected[1])


@torch.no_grad()
def test_a_graph_that_is_replayed_writes_to_the_same_memory_every_time(make_cache):
    cache, stock = make_cache(block_size=16), DynamicCache()
    static = [states_of(32) for _ in range(2)]  # few enough for the staging buffers, which else put all in order
    for _ in range(4):
        for layer_idx, memory in enumerate(static):
            memory.normal_()
            expected = stock.update(*memory.clone(), layer_idx)
            assert all(map(torch.equal, cache.update(*memory, layer_idx), expected))


@pytest.mark.parametrize("cut", [0, 1, 20, 90, 1000])
def test_cropping_while_layers_are_fetched_ahead(cut, make_cache):
    pair = Pair(make_cache(block_size=16, prefetch_depth=3))
    for length in (100, 1, 1):
        pair.forward(length)
    for _ in range(3):
        pair.ours.crop(-cut)
        pair.stock.crop(-min(cut, pair.stock.get_seq_length()))
        pair.forward(3)
        pair.forward(1)


def test_slots_that_grow_give_memory_back_only_when_nothing_is_on_its_way_there(make_cache):
    cache = make_cache(block_size=16, prefetch_depth=2)
    pair = Pair(cache)
    pair.forward(100)
    for length in (1, 1, 200, 1, 800, 1):
        pair.forward(length)
        # Fetched ahead, and then not wanted any more.
        for layer in cache.layers:
            layer._abandon_slot()
    pair.forward(1)


def test_slots_taken_from_layers_they_are_being_filled_for(make_cache, monkeypatch):
    pair = Pair(make_cache(block_size=16, prefetch_depth=2))
    for length in (100, 1):
        pair.forward(length)
    for layer in pair.ours.layers:
        layer._abandon_slot()
    pair.ours._pager.flush()
    read = Shard.read

    def read_slowly(shard, *args, **options):
        time.sleep(0.2 if shard.layer_idx == 2 else 0)
        read(shard, *args, **options)

    def interrupt(task):
        raise KeyboardInterrupt

    monkeypatch.setattr(Shard, "read", read_slowly)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", interrupt)
        for layer_idx in range(3):
            with pytest.raises(KeyboardInterrupt):
                pair.forward(1, order=[layer_idx])
            pair.stock.layers[layer_idx].crop(-1)
    pair.forward(1, order=[3])  # all slots are being filled: one must be taken


@pytest.mark.parametrize("steps", [0, 1])
def test_closing_waits_for_what_is_on_its_way(steps, make_cache, adversary):
    for _ in range(5):
        pair = Pair(make_cache(block_size=16, host_budget=20000))
        pair.forward(100)
        for _ in range(steps):
            pair.forward(1)
        pair.ours.close()
        del pair
        gc.collect()
        adversary.finish()  # a copy into memory that was given back would show now


def test_caches_made_and_dropped_in_loops(offload_dir, adversary):
    for _ in range(10):
        pair = Pair(OffloadedNVMeCache(offload_dir=offload_dir, block_size=16, host_budget=20000))
        pair.forward(50)
        pair.forward(1)
        del pair
    gc.collect()
    adversary.finish()
    assert list(offload_dir.iterdir()) == []


@pytest.mark.parametrize("tier", TIERS)
def test_rows_selected_between_steps(tier, make_cache):
    pair = Pair(make_cache(block_size=16, **TIERS[tier]))
    pair.forward(50, batch_size=3)
    for rows in ([2, 0, 1], [0, 0, 2], [1, 1, 1]):
        pair.ours.reorder_cache(torch.tensor(rows))
        pair.stock.reorder_cache(torch.tensor(rows))
        for length in (1, 20, 1):
            pair.forward(length, batch_size=3)


@torch.no_grad()
def test_returned_tensors_stay_until_the_layers_next_update(make_cache):
    pair = Pair(make_cache(block_size=16, prefetch_depth=1))
    pair.forward(50)
    for _ in range(4):
        held = []
        for layer_idx in range(4):
            new = states_of(1)
            expected = pair.stock.update(*new.clone(), layer_idx)
            held.append((pair.ours.update(*new, layer_idx), expected))
        for ours, expected in held:
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("tier", ["nvme", "mixed"])
def test_generate_inside_a_stream_of_the_users_own(tier, make_cache, adversary):
    model = tiny_model("qwen3")
    expected = generate(model, DynamicCache(config=model.config), 60)
    with adversary.stream_of_the_user():
        cache = make_cache(config=model.config, block_size=16, **TIERS[tier])
        assert_same(generate(model, cache, 60), expected)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_streams_that_change_between_steps(num_layers, make_cache, adversary):
    pair = Pair(make_cache(block_size=16), num_layers)
    pair.forward(50)
    pair.forward(1)
    for _ in range(3):
        with adversary.stream_of_the_user():
            pair.forward(1)
            pair.forward(1)
        pair.forward(1)


def forgive(adversary):
    adversary.finish()
    adversary.hazards.clear()


class TestTheExecutorItself:
    """It must not forgive what a device would not."""

    def test_reading_without_a_wait(self, adversary):
        target, source = adversary.device_memory(64), adversary.host_memory(64)[:64]
        with adversary.side_stream(adversary.mark()):
            adversary.copy(target[:64], source)
        with pytest.raises(HazardError):
            target.sum()
        adversary.wait(adversary.record())
        target.sum()
        forgive(adversary)

    def test_copying_before_what_is_copied_was_computed(self, adversary):
        target, early = adversary.host_memory(64)[:64], adversary.mark()
        source = torch.ones(64, dtype=torch.uint8) + 1
        with adversary.side_stream(early), pytest.raises(HazardError):
            adversary.copy(target, source)
        forgive(adversary)

    def test_events_stand_for_what_was_enqueued_when_they_were_recorded(self, adversary):
        target, source = adversary.device_memory(64), adversary.host_memory(64)[:64]
        event = adversary.record()
        with adversary.side_stream(adversary.mark()):
            adversary.copy(target[:64], source)
        adversary.wait(event)
        with pytest.raises(HazardError):
            target.sum()
        forgive(adversary)

    def test_memory_given_back_too_early_is_poisoned(self, adversary):
        adversary.progress = late
        target, source = adversary.host_memory(64)[:64].view(torch.float32), torch.ones(16)
        with adversary.side_stream(adversary.mark()):
            adversary.copy(target, source)
        del source
        adversary.wait(adversary.record())
        assert target.isnan().all()

    def test_copies_that_would_block_the_host(self, adversary):
        target, source = adversary.device_memory(64)[:64], adversary.host_memory(128)[:128:2]
        with adversary.side_stream(adversary.mark()), pytest.raises(HazardError):
            adversary.copy(target, source)
        forgive(adversary)


@pytest.mark.parametrize("tier", TIERS)
def test_segments_read_as_they_arrive(tier, make_cache, monkeypatch):
    """Streaming: each segment is there when attention reads it, and stays until it has been read."""
    monkeypatch.setattr(segments, "_WORTH_READING_ALONE", 0)  # so that blocks on the device are read where they are
    cache, stock = make_cache(block_size=16, prefetch_depth=1, **TIERS[tier]), DynamicCache()
    attentions = [Attention(cache, layer_idx) for layer_idx in range(4)]
    with torch.no_grad():
        for length in (50, 40, 1, 20, 1, 1, 30, 1):
            for layer_idx, attention in enumerate(attentions):
                new = states_of(length)
                expected = stock.update(*new.clone(), layer_idx)
                held = attention(*new)
                found = [part.clone() for part in held] if length == 50 else whole(held, expected)
                assert all(map(torch.equal, found, expected))


def whole(handles, expected):
    """What attention is shown of `handles`, put together."""
    found = [torch.full_like(part, torch.nan) for part in expected]

    def visit(keys, values, start, rows):
        for target, part in zip(found, (keys, values), strict=True):
            target[:, :, start : start + part.shape[2]] = part

    handles[0].streamed.read(visit)
    return found
