"""Inference mode, no_grad and gradients may follow each other on one cache, in any order."""

import contextlib
import copy
import itertools

import pytest
import torch

from nvme_cache.arguments import cache_argument

from .conftest import exact_and_int8, prompt, stock_for, tiny_model, tokens

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": contextlib.nullcontext}


@exact_and_int8
@pytest.mark.parametrize("order", list(itertools.permutations(MODES)), ids="-".join)
@pytest.mark.parametrize("tier", ["device_budget", "host_budget", "nvme"])
def test_modes_mix(order, tier, make_cache):
    cache = make_cache(block_size=16, **({} if tier == "nvme" else {tier: 1 << 30}))
    stock = stock_for(cache)
    for mode, length in itertools.product(order, (3, 40, 1)):
        states = [torch.randn(2, 1, 2, length, 16) for _ in range(4)]
        with MODES[mode]():
            for layer_idx, layer_states in enumerate(states):
                ours = cache.update(*layer_states, layer_idx)
                # Cloned: upstream's own cache cannot grow an inference tensor outside inference mode.
                expected = stock.update(*(part.clone() for part in layer_states), layer_idx)
                assert all(map(torch.equal, ours, expected))


def test_gradients_reach_the_new_tokens_and_never_the_old(make_cache):
    cache = make_cache(block_size=16)
    old = torch.randn(2, 1, 2, 40, 16, requires_grad=True)
    cache.update(*old, 0)
    new = torch.randn(2, 1, 2, 3, 16, requires_grad=True)
    keys, values = cache.update(*new, 0)
    (keys.sum() + 2 * values.sum()).backward()
    assert old.grad is None
    assert torch.equal(new.grad, torch.stack([torch.ones(1, 2, 3, 16), torch.full((1, 2, 3, 16), 2.0)]))


@exact_and_int8
def test_a_prefix_filled_with_gradients_can_be_copied_again_and_again(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    model(prompt(50), **{cache_argument(model): cache})
    with torch.no_grad():  # upstream's own cache cannot be copied with what autograd hangs on it
        model(prompt(50), **{cache_argument(model): stock})
    cache._pager.flush()
    shards = {path: path.read_bytes() for path in cache.offload_path.glob("*.safetensors")}
    for start in range(3):
        copied = copy.deepcopy(cache)
        whole = torch.cat([prompt(50), prompt(5) + start], dim=1)
        assert torch.equal(tokens(model, whole, copied), tokens(model, whole, copy.deepcopy(stock)))
        copied.close()
    assert shards and shards == {path: path.read_bytes() for path in cache.offload_path.glob("*.safetensors")}
    assert cache.get_seq_length() == 50


def test_what_autograd_saved_survives_later_updates(make_cache):
    """Decoding on in the same slot must not touch tensors that a backward pass still needs."""
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 1, 2, 40, 16), 0)
    query = torch.randn(1, 2, 1, 16, requires_grad=True)
    keys, values = cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    expected = keys.clone()
    attention = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    for _ in range(3):
        cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    attention.sum().backward()
    assert torch.equal(keys, expected)
