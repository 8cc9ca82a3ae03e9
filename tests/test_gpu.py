"""The same bits as `DynamicCache` on an accelerator, whichever torch reports: `pytest -m gpu`."""

import random
import time

import pytest
import torch
from transformers import DynamicCache

from nvme_cache import OffloadedNVMeCache, QuantizationConfig, io, segments
from nvme_cache.attention import STREAMING
from nvme_cache.attention.softmax import OnlineSoftmax
from nvme_cache.quantization import FORMATS

from .conftest import FAMILIES, Pair, assert_parity, assert_same, generate, prompt, tiers, tiny_model, tokens
from .fake_quantized import FakeQuantizedCache
from .test_decoding import MODES

pytestmark = pytest.mark.gpu

TIERS = tiers(mixed_bytes=20000)


@pytest.fixture
def device():
    found = torch.accelerator.current_accelerator()
    assert found is not None, "there is no accelerator here"
    return torch.device(found.type, 0)


def other_device(device):
    return torch.device(device.type, torch.accelerator.device_count() - 1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tier, attention, device, make_cache):
    model = tiny_model(family, attn_implementation=attention).to(device)
    for length, batch_size in ((5, 1), (40, 3), (100, 2)):
        cache = make_cache(config=model.config, block_size=16, **TIERS[tier])
        assert_parity(model, cache, length, batch_size, new_tokens=20)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 32}], ids=str)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_streaming(family, tier, options, device, make_cache, monkeypatch):
    monkeypatch.setattr(segments, "_WORTH_READING_ALONE", 0)  # so that blocks on the device are read where they are
    model = tiny_model(family, attn_implementation="eager").to(device)
    stock = generate(model, DynamicCache(config=model.config), 100, 2, **options)
    cache = make_cache(config=model.config, block_size=16, **TIERS[tier])
    model.set_attn_implementation(STREAMING)
    ours = generate(model, cache, 100, 2, **options)
    assert any(layer.is_streamed for layer in cache._paged_layers().values())
    assert torch.equal(ours.tokens, stock.tokens)
    assert torch.allclose(ours.logits.cpu(), stock.logits.cpu(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_length", [1, 7, 300])
def test_portions_add_up(q_length, dtype, device):
    """Also where a fused kernel takes the many queries of a prompt."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(2, heads, length, 64, generator=generator).to(device, dtype)
        for heads, length in ((6, q_length), (2, 1000), (2, 1000))
    )
    near, far = (OnlineSoftmax(part, 2, 0.125, 1000) for part in (queries, queries.cpu()))
    for start, end in ((0, 256), (256, 700), (700, 1000)):
        near.add(keys[:, :, start:end], values[:, :, start:end], start, None)
        far.add(keys[:, :, start:end].cpu(), values[:, :, start:end].cpu(), start, None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(near.result().cpu(), far.result(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "quantization", [*FORMATS, QuantizationConfig(key="int8", value="int4", sink_tokens=20)], ids=str
)
@pytest.mark.parametrize("tier", TIERS)
def test_quantized_blocks(tier, quantization, device, make_cache):
    model = tiny_model("qwen3", attn_implementation="eager").to(device)
    for options in ({}, {"num_beams": 3}):
        cache = make_cache(config=model.config, block_size=16, quantization=quantization, **TIERS[tier])
        reference = FakeQuantizedCache(model.config, 16, quantization)
        assert_same(generate(model, cache, 100, 2, **options), generate(model, reference, 100, 2, **options))


@pytest.mark.parametrize("tier", ["nvme", "mixed"])
@pytest.mark.parametrize("mode", MODES)
def test_decoding_modes(mode, tier, device, make_cache):
    model = tiny_model("qwen3", attn_implementation="eager").to(device)
    ids = prompt(60).to(device)
    expected = tokens(model, ids, DynamicCache(config=model.config), **MODES[mode])
    cache = make_cache(config=model.config, block_size=16, **TIERS[tier])
    assert torch.equal(tokens(model, ids, cache, **MODES[mode]), expected)


@pytest.mark.parametrize("seed", range(5))
def test_drives_and_threads_may_be_slow_at_any_moment(seed, device, make_cache, monkeypatch):
    draw = random.Random(seed)

    def delayed(function):
        def run(*args):
            time.sleep(draw.choice([0, 0, 0.001, 0.01]))
            return function(*args)

        return run

    for name in ("read_all", "write_all"):
        monkeypatch.setattr(io, name, delayed(getattr(io, name)))
    model = tiny_model("llama", attn_implementation="eager").to(device)
    assert_parity(model, make_cache(block_size=16, host_budget=10000), 80)


def test_generate_inside_a_stream_of_the_users_own(device, make_cache):
    model = tiny_model("qwen3", attn_implementation="eager").to(device)
    expected = generate(model, DynamicCache(config=model.config), 60)
    stream, before = torch.Stream(device=device), torch.accelerator.current_stream(device)
    stream.wait_stream(before)
    torch.accelerator.set_stream(stream)
    try:
        ours = generate(model, make_cache(block_size=16), 60)
    finally:
        torch.accelerator.set_stream(before)
    before.wait_stream(stream)
    assert_same(ours, expected)


@pytest.mark.parametrize("tier", TIERS)
def test_layers_on_several_devices_whichever_is_current(tier, device, make_cache):
    other = other_device(device)
    torch.accelerator.set_device_index(other.index)
    try:
        pair = Pair(make_cache(block_size=16, **TIERS[tier]), devices=[device, other])
        for length in (100, 1, 20, 1, 1):
            torch.accelerator.set_device_index((other if length == 20 else device).index)
            pair.forward(length)
    finally:
        torch.accelerator.set_device_index(device.index)


@pytest.mark.parametrize("cut", [1, 20, 90])
@pytest.mark.parametrize("tier", TIERS)
def test_cropping_and_selecting_rows_while_layers_are_fetched_ahead(tier, cut, device, make_cache):
    pair = Pair(make_cache(block_size=16, prefetch_depth=3, **TIERS[tier]), devices=[device])
    for length in (100, 1, 1):
        pair.forward(length, batch_size=3)
    for rows in ([2, 0, 1], [0, 0, 2]):
        for cache in (pair.ours, pair.stock):
            cache.crop(-cut)
            cache.reorder_cache(torch.tensor(rows))
        pair.forward(30, batch_size=3)
        pair.forward(1, batch_size=3)
    # The next slots must grow while what was fetched ahead is still on its way to the old ones.
    pair.forward(400, batch_size=3)
    pair.forward(1, batch_size=3)


def test_a_default_device_changes_nothing(device, make_cache):
    model = tiny_model("llama", attn_implementation="eager").to(device)
    expected = tokens(model, prompt(60).to(device), DynamicCache(config=model.config), num_beams=3)
    with device:
        cache = make_cache(config=model.config, block_size=16, host_budget=20000)
        assert torch.equal(tokens(model, prompt(60).to(device), cache, num_beams=3), expected)


def test_memory_on_the_device_stays_flat_over_caches(device, make_cache):
    def reserved():
        torch.accelerator.synchronize(device)
        return torch.accelerator.memory_reserved(device)

    sizes = []
    for _ in range(8):
        cache = make_cache(block_size=16)
        pair = Pair(cache, devices=[device])
        for length in (200, 1, 1):
            pair.forward(length)
        cache.close()
        del pair, cache
        sizes.append(reserved())
    assert sizes[-1] == sizes[1]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("given", ["model", "config"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_snapshots_go_on_where_the_model_is(family, given, quantization, device, make_cache, tmp_path):
    """Saved with blocks in every tier; what is opened by a config alone is moved by its first update."""
    model = tiny_model(family, attn_implementation="eager").to(device)
    ids = prompt(60, 2).to(device)
    cache = make_cache(config=model.config, block_size=16, quantization=quantization, **TIERS["mixed"])
    longer = tokens(model, ids, cache, max_new_tokens=20)
    cache.save_pretrained(tmp_path / "snapshot", model=model)
    expected = tokens(model, longer, cache, max_new_tokens=20)
    source = {"model": model} if given == "model" else {"config": model.config}
    for host_budget in (0, 1 << 20):
        options = {"offload_dir": cache.offload_path.parent, "host_budget": host_budget}
        with (
            OffloadedNVMeCache.from_pretrained(tmp_path / "snapshot", **source, **options) as ours,
            ours.fork() as fork,
        ):
            assert torch.equal(tokens(model, longer, ours, max_new_tokens=20), expected)
            assert torch.equal(tokens(model, longer, fork, max_new_tokens=20), expected)
