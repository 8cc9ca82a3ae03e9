"""Generation through the paged cache equals generation through `DynamicCache`, bit for bit; quantized, generation
through a `DynamicCache` whose blocks quanto quantizes.
"""

import itertools

import pytest
import torch

from nvme_cache.arguments import cache_argument

from .conftest import (
    FAMILIES,
    assert_parity,
    exact_and_int8,
    exact_int8_and_mixed,
    prompt,
    stock_for,
    tiny_model,
    tokens,
)


@exact_and_int8
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("prompt_length", [5, 16, 100])
def test_families(family, batch_size, prompt_length, make_cache):
    model = tiny_model(family)
    cache = make_cache(config=model.config, block_size=16)
    assert_parity(model, cache, prompt_length, batch_size)


@exact_and_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("prompt_length", [9, 256, 700])
def test_dtypes_and_block_sizes(dtype, block_size, prompt_length, make_cache):
    model = tiny_model(dtype=dtype)
    cache = make_cache(config=model.config, block_size=block_size)
    assert_parity(model, cache, prompt_length, batch_size=3)


@exact_and_int8
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_kernels_see_strided_views(attention, kv_heads, make_cache):
    model = tiny_model(num_key_value_heads=kv_heads)
    model.set_attn_implementation(attention)
    assert_parity(model, make_cache(config=model.config, block_size=16), 70, batch_size=2)


LAYERS_AND_DEPTHS = [
    *itertools.product(range(1, 10), range(5), [None]),
    *itertools.product([1, 2, 5], [0, 2, 4], ["int8"]),
]


@pytest.mark.parametrize(("num_layers", "prefetch_depth", "quantization"), LAYERS_AND_DEPTHS)
def test_layers_and_prefetch_depths(num_layers, prefetch_depth, make_cache):
    model = tiny_model(num_hidden_layers=num_layers)
    cache = make_cache(config=model.config, block_size=16, prefetch_depth=prefetch_depth)
    assert_parity(model, cache, 50, new_tokens=10)


BUDGETS = {
    "all on nvme": (0, 0),
    "all on host": (0, 1 << 30),
    "all on device": (1 << 30, 0),
    "all three": (4 * 3 * 4096, 4 * 2 * 4096),  # 4 layers, three blocks on the device, two on the host each
}


@exact_and_int8
@pytest.mark.parametrize("budgets", BUDGETS)
def test_beams_in_tiers(budgets, make_cache):
    model = tiny_model()
    device_budget, host_budget = BUDGETS[budgets]
    # Small blocks, so that many are sealed after the beams have parted.
    cache = make_cache(config=model.config, block_size=4, device_budget=device_budget, host_budget=host_budget)
    assert_parity(model, cache, 40, 3, new_tokens=40, num_beams=4)


@exact_int8_and_mixed
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("chunk", [None, 33])
def test_tiers(budgets, chunk, make_cache):
    model = tiny_model()
    device_budget, host_budget = BUDGETS[budgets]
    cache = make_cache(config=model.config, block_size=16, device_budget=device_budget, host_budget=host_budget)
    assert_parity(model, cache, 300, prefill_chunk_size=chunk)
    assert (cache.memory_usage()["nvme"] > 0) == (budgets in ("all on nvme", "all three"))
    assert (cache.memory_usage()["host"] > 0) == (budgets in ("all on host", "all three"))


@pytest.mark.parametrize("budgets", BUDGETS)
def test_blocks_fill_the_budgets_to_the_byte(budgets, make_cache):
    model = tiny_model()
    device_budget, host_budget = BUDGETS[budgets]
    cache = make_cache(config=model.config, block_size=16, device_budget=device_budget, host_budget=host_budget)
    tokens(model, prompt(200), cache)
    usage = cache.memory_usage()
    tail = 4 * 256 * (cache.get_seq_length() % 16)  # layers x bytes a token and layer x tokens short of a block
    block = 4 * 4096  # all layers
    blocks = cache.get_seq_length() // 16
    expected = {
        "all on nvme": (tail, 0, blocks * block),
        "all on host": (tail, blocks * block, 0),
        "all on device": (tail + blocks * block, 0, 0),
        "all three": (tail + 3 * block, 2 * block, (blocks - 5) * block),
    }[budgets]
    assert (usage["device"], usage["host"], usage["nvme"]) == expected


@exact_and_int8
@pytest.mark.parametrize("options", [{}, {"num_beams": 4, "do_sample": True}], ids=["greedy", "beam sampling"])
def test_both_argument_names_with_and_without_config(options, make_cache):
    model = tiny_model()
    ids = torch.arange(3, 103)[None]
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True} | options
    without, informed = make_cache(block_size=4), make_cache(config=model.config, block_size=4)
    logits = []
    for cache in (
        {cache_argument(model): stock_for(informed, model.config)},
        {"past_key_values": without},
        {cache_argument(model): informed},
    ):
        torch.manual_seed(0)
        logits.append(torch.stack(model.generate(ids, **cache, **options, output_logits=True).logits))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_the_returned_cache_is_the_one_passed(make_cache):
    model = tiny_model()
    cache = make_cache()
    output = model.generate(
        torch.arange(3, 40)[None],
        past_key_values=cache,
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.past_key_values is cache
    assert cache.get_seq_length() == 39
