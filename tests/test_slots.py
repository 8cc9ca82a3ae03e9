"""What `update` returns stays as it is until that layer's next update, whoever holds it, whatever is fetched."""

import weakref

import pytest
import torch
from transformers import DynamicCache

from nvme_cache.drive import Drive

HEADS, WIDTH = 2, 16


@pytest.fixture(autouse=True)
def without_gradients():
    """With gradients enabled what is returned is a copy, never a slot."""
    with torch.no_grad():
        yield


def steps(num_layers, lengths):
    """Keys and values for each step and layer."""
    return [[torch.randn(2, 1, HEADS, length, WIDTH) for _ in range(num_layers)] for length in lengths]


@pytest.mark.parametrize("num_layers", range(1, 10))
@pytest.mark.parametrize("prefetch_depth", range(1, 5))
def test_held_tensors_outlive_the_forward(num_layers, prefetch_depth, make_cache):
    """Models that share KV across layers keep every layer's tensors until the forward ends."""
    cache, stock = make_cache(block_size=16, prefetch_depth=prefetch_depth), DynamicCache()
    for step in steps(num_layers, [40] + [1] * 20):
        held = [(cache.update(*states, i), stock.update(*states, i)) for i, states in enumerate(step)]
        for (keys, values), (stock_keys, stock_values) in held:
            assert torch.equal(keys, stock_keys)
            assert torch.equal(values, stock_values)


def test_slots_are_reused_when_nobody_holds_them(make_cache):
    num_layers, depth = 6, 2
    cache = make_cache(block_size=16, prefetch_depth=depth)
    addresses = set()
    for step in steps(num_layers, [40] + [1] * 8):  # as many as fit before slots have to grow
        for layer_idx, states in enumerate(step):
            address = cache.update(*states, layer_idx)[0].data_ptr()
            if states.shape[3] == 1:
                addresses.add(address)
    assert len(addresses) == depth + 1


def test_slots_held_by_a_sharing_model_come_back_after_the_forward(make_cache):
    cache = make_cache(block_size=16, prefetch_depth=1)
    addresses = set()
    for step in steps(6, [40] + [1] * 8):
        held = [cache.update(*states, layer_idx) for layer_idx, states in enumerate(step)]
        if held[0][0].shape[2] > 40:
            addresses.update(keys.data_ptr() for keys, _ in held)
    assert len(addresses) <= 6 + 2


@pytest.mark.parametrize("hold", [True, False])
def test_crop_then_append_does_not_change_what_was_returned(hold, make_cache):
    cache, stock = make_cache(block_size=16, prefetch_depth=2), DynamicCache()
    for states in (torch.randn(2, 1, HEADS, length, WIDTH) for length in (40, 5, 5)):
        returned, expected = cache.update(*states, 0), stock.update(*states, 0)
    expected = [states.clone() for states in expected]
    if not hold:
        returned = None
    cache.crop(-7)
    stock.crop(-7)
    states = torch.randn(2, 1, HEADS, 4, WIDTH)
    for ours, theirs in zip(cache.update(*states, 0), stock.update(*states, 0), strict=True):
        assert torch.equal(ours, theirs)
    if hold:
        for ours, theirs in zip(returned, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_layers_of_different_shapes_share_slots(make_cache):
    cache, stock = make_cache(block_size=16, prefetch_depth=1), DynamicCache()
    shapes = [(2, 16), (1, 64), (4, 8), (2, 24), (8, 128)]
    for length in [40] + [1] * 10:
        for layer_idx, (heads, width) in enumerate(shapes):
            states = torch.randn(1, heads, length, width), torch.randn(1, heads, length, width // 2)
            for ours, theirs in zip(cache.update(*states, layer_idx), stock.update(*states, layer_idx), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 3])
def test_no_more_slots_than_asked_for(prefetch_depth, make_cache):
    """Also right after a fetch: what fills a slot must have let go of it by then."""
    for _ in range(20):
        cache = make_cache(block_size=16, prefetch_depth=prefetch_depth)
        for step in steps(8, [40, 1, 1, 1]):
            for layer_idx, states in enumerate(step):
                cache.update(*states, layer_idx)
            cache.reorder_cache(torch.tensor([0]))
        (lane,) = cache._pager._lanes.values()
        assert len(lane.slots._slots) <= prefetch_depth + 1


def test_slots_made_for_a_holder_are_given_up_when_nobody_holds_any(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.slots._WINDOW", 16)
    cache = make_cache(block_size=16, prefetch_depth=1)
    for step in steps(8, [40, 1]):
        held = [cache.update(*states, layer_idx) for layer_idx, states in enumerate(step)]
    (lane,) = cache._pager._lanes.values()
    assert len(lane.slots._slots) >= 8
    del held
    for step in steps(8, [1] * 10):
        for layer_idx, states in enumerate(step):
            cache.update(*states, layer_idx)
    assert len(lane.slots._slots) == 2


def test_slots_are_given_up_when_layers_have_grown(make_cache, monkeypatch):
    monkeypatch.setattr("nvme_cache.slots._WINDOW", 16)
    monkeypatch.setattr(Drive, "prefetch_depth", lambda _, layer_bytes, is_exact: 4 if layer_bytes < 50_000 else 2)
    cache = make_cache(block_size=16, prefetch_depth="auto")
    counts = []
    for step in steps(8, [40, 1, 1, 200, *[1] * 10]):
        for layer_idx, states in enumerate(step):
            cache.update(*states, layer_idx)
        (lane,) = cache._pager._lanes.values()
        counts.append(len(lane.slots._slots))
    assert counts[:4] == [4, 5, 5, 5]
    assert counts[-1] == 3


def test_growing_a_slot_lets_go_of_the_old_memory_first(make_cache, monkeypatch):
    cache = make_cache(block_size=16, prefetch_depth=0)
    cache.update(*torch.randn(2, 1, HEADS, 40, WIDTH), 0)
    cache.update(*torch.randn(2, 1, HEADS, 1, WIDTH), 0)
    (lane,) = cache._pager._lanes.values()
    old = weakref.ref(lane.slots._slots[0]._host)
    alive = []
    allocate = lane.transfer.device_memory

    def watched(nbytes):
        alive.append(old())
        return allocate(nbytes)

    monkeypatch.setattr(lane.transfer, "device_memory", watched)
    cache.update(*torch.randn(2, 1, HEADS, 400, WIDTH), 0)
    assert alive == [None]
