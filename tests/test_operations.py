"""What a cache can be asked apart from decoding: tokens in any order and of any shape, rows, sizes, budgets."""

import copy
from collections.abc import Mapping

import pytest
import torch
from transformers import DynamicCache

from nvme_cache import OffloadedNVMeCache

from .conftest import exact_and_int8, exact_int8_and_mixed, prompt, stock_for, tiny_model, tokens


@exact_int8_and_mixed
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]])
def test_layers_in_any_order_appended_from_outside_or_never(order, make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    cache.layers += [copy.deepcopy(layer) for layer in make_cache(config=tiny_model().config, block_size=16).layers[:2]]
    for length in (0, 40, 1, 17, 0, 1):
        for layer_idx in order:
            states = torch.randn(2, 1, 2, length, 8)
            ours, theirs = cache.update(*states, layer_idx), stock.update(*states, layer_idx)
            assert all(map(torch.equal, ours, theirs))
    assert cache.get_seq_length(7) == 0


@exact_int8_and_mixed
def test_layers_filled_by_hand_one_after_the_other_and_to_any_depth(make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    order = [0, 0, 0, 1, 1, 1, 2, 3, 2, 3, 2, 3, *range(4), *range(2), *range(4), 1, 0, 3]
    for layer_idx in order:
        states = torch.randn(2, 1, 2, 20, 8)
        ours, theirs = cache.update(*states, layer_idx), stock.update(*states, layer_idx)
        assert all(map(torch.equal, ours, theirs))
    assert [cache.get_seq_length(i) for i in range(4)] == [stock.get_seq_length(i) for i in range(4)]


@exact_int8_and_mixed
def test_keys_that_are_the_values(make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    for length in (40, 1, 20, 1):
        states = torch.randn(1, 1, length, 24)
        for ours, theirs in zip(cache.update(states, states, 0), stock.update(states, states, 0), strict=True):
            assert torch.equal(ours, theirs)


@exact_and_int8
def test_early_initialization_fixes_neither_width_nor_type(make_cache):
    cache = make_cache(config=tiny_model().config, block_size=16)
    cache.early_initialization(2, 2, 16, torch.float16, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    keys, values = torch.randn(1, 3, 40, 24), torch.randn(1, 3, 40, 8)
    stock = stock_for(cache)
    for either in (cache, stock):
        either.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)
    assert torch.equal(cache.layers[0].values, stock.layers[0].values)


@exact_and_int8
def test_ddp_data(make_cache):
    model = tiny_model()
    filled = DynamicCache(config=model.config)
    tokens(model, prompt(40), filled)
    rebuilt = make_cache(ddp_cache_data=list(filled), block_size=16)
    stock = stock_for(rebuilt)
    for layer_idx, (keys, values, _) in enumerate(filled):
        stock.update(keys, values, layer_idx)
    for ours, theirs in zip(rebuilt, stock, strict=True):
        assert all(map(torch.equal, ours[:2], theirs[:2]))


def test_ddp_data_of_sliding_layers_and_config_in_its_place(offload_dir):
    sliding = tiny_model("gemma3")
    stock = DynamicCache(config=sliding.config)
    tokens(sliding, prompt(40), stock)
    with OffloadedNVMeCache(list(stock), offload_dir=offload_dir, host_budget=0, block_size=16) as rebuilt:
        again = DynamicCache(list(stock))
        for ours, theirs in zip(rebuilt, again, strict=True):
            assert all(map(torch.equal, ours[:2], theirs[:2]))
    with OffloadedNVMeCache(tiny_model().config, offload_dir=offload_dir, offloading=False) as cache:
        assert len(cache) == 4


@exact_and_int8
@pytest.mark.parametrize("rows", [(0, 2), [2], torch.tensor([2, 2, 1]), torch.tensor([True, False, True])], ids=str)
@pytest.mark.parametrize("of", ["cache", "layer"])
def test_rows_may_be_named_as_any_index(rows, of, make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    for either in (cache, stock):
        torch.manual_seed(0)
        either.update(*torch.randn(2, 3, 2, 40, 16), 0)
        (either if of == "cache" else either.layers[0]).batch_select_indices(rows)
    assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)


@exact_int8_and_mixed
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 25, 39, 40, 41, 1000])
@pytest.mark.parametrize("of", ["cache", "layer"])
def test_cropping_leaves_the_oldest_tokens(count, of, make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    states = torch.randn(2, 1, 2, 40, 16)
    for layer_idx in range(2):
        cache.update(*states, layer_idx)
        stock.update(*states, layer_idx)
    for target in [cache] if of == "cache" else cache.layers:
        target.crop(torch.tensor(-count))
    stock.crop(-count)
    kept = max(0, 40 - count)
    assert [cache.get_seq_length(layer_idx) for layer_idx in range(2)] == [kept] * 2
    assert type(cache.get_seq_length()) is int  # and no tensor, on which each use would wait for the device
    assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)
    new = torch.randn(2, 1, 2, 1, 16)
    with torch.no_grad():
        assert all(map(torch.equal, cache.update(*new, 0), stock.update(*new, 0)))


def test_cropping_what_was_never_filled(make_cache):
    cache = make_cache(config=tiny_model().config)
    cache.crop(-5)
    cache.crop(0)
    assert cache.get_seq_length() == 0


def test_selecting_no_rows_leaves_nothing(make_cache):
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 2, 2, 40, 16), 0)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.get_seq_length() == 0
    states = torch.randn(2, 3, 2, 5, 16)
    assert all(map(torch.equal, cache.update(*states, 0), states))


@exact_and_int8
def test_values_of_no_width(make_cache):
    cache = make_cache(block_size=16)
    stock = stock_for(cache)
    for length in (40, 1, 1):
        states = torch.randn(1, 2, length, 64), torch.empty(1, 2, length, 0)
        assert all(map(torch.equal, cache.update(*states, 0), stock.update(*states, 0)))


def test_discarded_copies_leave_the_budgets_alone(make_cache):
    cache = make_cache(block_size=16, host_budget=64 * 4 * 256)
    cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
    for _ in range(5):
        copy.deepcopy(cache.layers[0])
    cache.reset()
    cache.update(*torch.randn(2, 1, 2, 64, 16), 0)
    assert cache.memory_usage()["nvme"] == 64 * 256 - cache.memory_usage()["host"]
    assert cache.memory_usage()["host"] == 64 * 4 * 256 // 64 // (16 * 256) * 16 * 256


def test_without_a_config_the_budgets_are_shared_out_after_the_first_forward(make_cache):
    block = 16 * 256
    cache = make_cache(block_size=16, host_budget=2 * 3 * block)  # three blocks for each of two layers
    for _ in range(4):
        for layer_idx in range(2):
            cache.update(*torch.randn(2, 1, 2, 16, 16), layer_idx)
    assert [dict(layer.used_bytes()) for layer in cache.layers] == [{"nvme": block, "host": 3 * block}] * 2


def test_asking_reads_nothing(make_cache):
    cache = make_cache(config=tiny_model().config, block_size=16)
    assert bool(cache) and bool(make_cache())
    assert make_cache().get_max_length() == -1
    assert not make_cache().is_croppable
    for layer_idx in range(4):
        cache.update(*torch.randn(2, 1, 2, 40, 16), layer_idx)
    before = cache._pager.meter.read_bytes
    assert len(cache) == 4
    assert "4 layers, 40 tokens" in repr(cache)
    assert cache.get_seq_length() == 40
    assert cache.batch_size == 1
    assert cache.is_croppable and not cache.is_compileable
    # Whatever walks through a model's inputs, to move or to export them, must see one opaque object.
    assert not hasattr(cache, "to")
    assert not isinstance(cache, torch.nn.Module | tuple | list | Mapping)
    assert cache._pager.meter.read_bytes == before
