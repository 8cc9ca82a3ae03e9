"""Every way of decoding that transformers offers, bit for bit, with everything on NVMe."""

import copy
import random
import time
from threading import Thread

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from nvme_cache import OffloadedNVMeCache, io
from nvme_cache.integration import cache_argument

from .conftest import FAMILIES, assert_parity, tiny_model


def tokens(model, ids, cache, **options):
    options = {"max_new_tokens": 24, "do_sample": False} | options
    torch.manual_seed(5)
    return model.generate(ids, **{cache_argument(model): cache}, **options)


def prompt(length, rows=1):
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(1))


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "several return sequences": {"num_return_sequences": 3, "do_sample": True},
    "beams and return sequences": {"num_beams": 4, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 7": {"prefill_chunk_size": 7},
    "chunks of a block": {"prefill_chunk_size": 16},
    "chunks of a block and one": {"prefill_chunk_size": 17},
    "one chunk too long": {"prefill_chunk_size": 1000},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modes(mode, family, make_cache):
    model = tiny_model(family)
    expected = tokens(model, prompt(60), DynamicCache(config=model.config), **MODES[mode])
    assert torch.equal(
        tokens(model, prompt(60), make_cache(config=model.config, block_size=16), **MODES[mode]), expected
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_implementations(attention, family, make_cache):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    assert_parity(model, make_cache(config=model.config, block_size=16), 60, 2)


def test_flex_attention(make_cache):
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    assert_parity(model, make_cache(config=model.config, block_size=16), 60, new_tokens=3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])  # Gemma's assistants ask the hub for a tokenizer
def test_assisted(family, make_cache):
    model, assistant = tiny_model(family), tiny_model(family, num_hidden_layers=2)
    options = {"assistant_model": assistant}
    expected = tokens(model, prompt(60), DynamicCache(config=model.config), **options)
    assert torch.equal(tokens(model, prompt(60), make_cache(config=model.config, block_size=16), **options), expected)


@pytest.mark.parametrize("whole", [True, False], ids=["whole sequence", "new tokens and a mask over all"])
def test_several_turns_on_one_cache(whole, make_cache):
    model = tiny_model()
    ours, stock = make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)
    sequences = [prompt(40), prompt(40)]
    for turn in range(5):
        for i, cache in enumerate((ours, stock)):
            history = torch.cat([sequences[i], prompt(11 + turn) + turn], dim=1)
            new = history if whole or not turn else history[:, cache.get_seq_length() :]
            output = tokens(model, new, cache, attention_mask=torch.ones_like(history), max_new_tokens=9)
            sequences[i] = output if whole or not turn else torch.cat([history, output[:, new.shape[1] :]], dim=1)
        assert torch.equal(*sequences)


@pytest.mark.parametrize("copies", ["crop", "deepcopy"])
def test_one_prefix_and_several_suffixes(copies, make_cache):
    model = tiny_model()
    prefix = prompt(70)
    ours, stock = make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (ours, stock):
            model(prefix, **{cache_argument(model): cache})
    for suffix_length in (5, 16, 40):
        whole = torch.cat([prefix, prompt(suffix_length) + 1], dim=1)
        results = []
        for cache in (ours, stock):
            used = copy.deepcopy(cache) if copies == "deepcopy" else cache
            results.append(tokens(model, whole, used, attention_mask=torch.ones_like(whole)))
            if copies == "crop":
                cache.crop(70 - cache.get_seq_length())
            elif isinstance(used, OffloadedNVMeCache):
                used.close()
        assert torch.equal(*results)
        assert ours.get_seq_length() == stock.get_seq_length() == 70


def test_a_warm_cache_repeated_for_beams(make_cache):
    model = tiny_model()
    results = []
    for cache in (make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)):
        with torch.no_grad():
            model(prompt(50), **{cache_argument(model): cache})
        cache.batch_repeat_interleave(4)
        results.append(tokens(model, torch.cat([prompt(50), prompt(3)], dim=1), cache, num_beams=4))
    assert torch.equal(*results)


def test_generating_in_another_thread_with_a_streamer(make_cache):
    class Collector(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            pass

    model = tiny_model()
    expected = tokens(model, prompt(60), DynamicCache(config=model.config))
    streamer, cache = Collector(), make_cache(config=model.config, block_size=16)
    for _ in range(2):  # two threads one after the other may share a cache
        thread = Thread(target=tokens, args=(model, prompt(60), cache), kwargs={"streamer": streamer})
        thread.start()
        thread.join()
        cache.reset()
    assert streamer.seen == expected[0].tolist() * 2


def test_hybrid_of_linear_and_full_attention_step_by_step(make_cache):
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, head_dim=16,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        vocab_size=256, layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    cache = make_cache(config=config, block_size=16)
    assert_parity(model, cache, 60, 2, new_tokens=64)
    assert cache.memory_usage()["nvme"] > 0
    for rows in (lambda c: c.batch_repeat_interleave(2), lambda c: c.batch_select_indices(torch.tensor([3, 0]))):
        rows(cache)
        for layer in cache.layers:
            states = layer.keys if hasattr(layer, "keys") else layer.recurrent_states[0]
            assert states.shape[0] == cache.layers[1].batch_size


T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 256,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_encoder_decoder(options, make_cache):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5)).eval()
    model.generation_config.eos_token_id = None
    config = model.config.get_text_config(decoder=True)
    stock = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    ours = EncoderDecoderCache(make_cache(config=config, block_size=8), DynamicCache(config=config))
    expected = tokens(model, prompt(20, 2), stock, **options)
    assert torch.equal(tokens(model, prompt(20, 2), ours, **options), expected)
    ours.reset()
    stock.reset()
    if stock.get_seq_length() == 0:  # in older versions upstream's own reset, which the cross-attention has, keeps it
        other = prompt(20, 2) + 1
        fresh = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        assert torch.equal(tokens(model, other, ours, **options), tokens(model, other, fresh, **options))


def test_cross_attention_may_be_paged_too(make_cache):
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=80,
        vocab_size=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    features = torch.randn(2, 8, 100)
    name = cache_argument(model)

    def run(cache):
        with torch.no_grad():
            logits = [
                model(input_features=features, decoder_input_ids=prompt(1, 2), **{name: cache}, use_cache=True).logits
                for _ in range(30)
            ]
        return torch.stack(logits)

    expected = run(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert torch.equal(run(EncoderDecoderCache(make_cache(block_size=8), make_cache(block_size=8))), expected)


def test_autocast_mixes_dtypes_as_concatenation_does(make_cache):
    model = tiny_model()
    ids, results = prompt(60), []
    for cache in (make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            first = model(ids[:, :50], **{cache_argument(model): cache}).logits
        with torch.no_grad():
            second = model(ids[:, 50:], **{cache_argument(model): cache}).logits
        results.append((first, second, cache.layers[0].keys, cache.layers[0].values))
    for ours, stock in zip(*results, strict=True):
        assert ours.dtype == stock.dtype
        assert torch.equal(ours, stock)


def test_weights_offloaded_by_accelerate(make_cache):
    from accelerate import cpu_offload

    model = tiny_model()
    expected = tokens(model, prompt(60), DynamicCache(config=model.config))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(tokens(model, prompt(60), make_cache(config=model.config, block_size=16)), expected)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]])
def test_layers_in_any_order_appended_from_outside_or_never(order, make_cache):
    cache, stock = make_cache(block_size=16), DynamicCache()
    cache.layers += [copy.deepcopy(layer) for layer in make_cache(config=tiny_model().config, block_size=16).layers[:2]]
    for length in (0, 40, 1, 17, 0, 1):
        for layer_idx in order:
            states = torch.randn(2, 1, 2, length, 8)
            ours, theirs = cache.update(*states, layer_idx), stock.update(*states, layer_idx)
            assert all(map(torch.equal, ours, theirs))
    assert cache.get_seq_length(7) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_goes_on_with_a_longer_mask(family, make_cache):
    model, results = tiny_model(family), []
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[1, :9], mask[2, :30] = 0, 0
    for cache in (make_cache(config=model.config, block_size=16), DynamicCache(config=model.config)):
        with torch.no_grad():
            logits = []
            for start, end in ((0, 40), (40, 57), (57, 58), (58, 60)):
                ids = prompt(60, 3)[:, start:end]
                logits.append(model(ids, attention_mask=mask[:, :end], **{cache_argument(model): cache}).logits)
        results.append(torch.cat(logits, dim=1))
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup", "chunks of 7"])
def test_drives_and_threads_may_be_slow_at_any_moment(mode, make_cache, monkeypatch):
    """Delays where the drive is asked: nothing may rest on a read or a write having been fast."""
    chance = random.Random(0)
    for name in ("read_all", "write_all"):
        original = getattr(io, name)

        def delayed(*arguments, original=original):
            time.sleep(chance.choice([0, 0, 0.002, 0.01]))
            original(*arguments)

        monkeypatch.setattr(io, name, delayed)
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16, host_budget=2 * 4096 * 4)
    expected = tokens(model, prompt(60), DynamicCache(config=model.config), **MODES[mode])
    assert torch.equal(tokens(model, prompt(60), cache, **MODES[mode]), expected)


def test_keys_that_are_the_values(make_cache):
    cache, stock = make_cache(block_size=16), DynamicCache()
    for length in (40, 1, 20, 1):
        states = torch.randn(1, 1, length, 24)
        for ours, theirs in zip(cache.update(states, states, 0), stock.update(states, states, 0), strict=True):
            assert torch.equal(ours, theirs)


def test_early_initialization_fixes_neither_width_nor_type(make_cache):
    cache = make_cache(config=tiny_model().config, block_size=16)
    cache.early_initialization(2, 2, 16, torch.float16, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    keys, values = torch.randn(1, 3, 40, 24), torch.randn(1, 3, 40, 8)
    cache.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, keys)
    assert torch.equal(cache.layers[0].values, values)


def test_ddp_data_and_config_in_its_place(make_cache, offload_dir):
    model = tiny_model()
    stock = DynamicCache(config=model.config)
    tokens(model, prompt(40), stock)
    rebuilt = OffloadedNVMeCache(list(stock), offload_dir=offload_dir, host_budget=0, block_size=16)
    for ours, theirs in zip(rebuilt, stock, strict=True):
        assert all(map(torch.equal, ours[:2], theirs[:2]))
    rebuilt.close()
    sliding = tiny_model("gemma3")
    stock = DynamicCache(config=sliding.config)
    tokens(sliding, prompt(40), stock)
    with OffloadedNVMeCache(list(stock), offload_dir=offload_dir, host_budget=0, block_size=16) as rebuilt:
        again = DynamicCache(list(stock))
        for ours, theirs in zip(rebuilt, again, strict=True):
            assert all(map(torch.equal, ours[:2], theirs[:2]))
    with OffloadedNVMeCache(model.config, offload_dir=offload_dir, offloading=False) as cache:
        assert len(cache) == 4


@pytest.mark.parametrize("rows", [(0, 2), [2], torch.tensor([2, 2, 1]), torch.tensor([True, False, True])], ids=str)
@pytest.mark.parametrize("of", ["cache", "layer"])
def test_rows_may_be_named_as_any_index(rows, of, make_cache):
    cache, stock = make_cache(block_size=16), DynamicCache()
    for either in (cache, stock):
        torch.manual_seed(0)
        either.update(*torch.randn(2, 3, 2, 40, 16), 0)
        (either if of == "cache" else either.layers[0]).batch_select_indices(rows)
    assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)


def test_selecting_no_rows_leaves_nothing(make_cache):
    cache = make_cache(block_size=16)
    cache.update(*torch.randn(2, 2, 2, 40, 16), 0)
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.get_seq_length() == 0
    states = torch.randn(2, 3, 2, 5, 16)
    assert all(map(torch.equal, cache.update(*states, 0), states))


def test_values_of_no_width(make_cache):
    cache, stock = make_cache(block_size=16), DynamicCache()
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
    before = cache._pager.counters.read_bytes
    assert len(cache) == 4
    assert "4 layers, 40 tokens" in repr(cache)
    assert cache.get_seq_length() == 40
    assert cache.batch_size == 1
    assert cache.is_croppable and not cache.is_compileable
    assert not hasattr(cache, "to")
    assert cache._pager.counters.read_bytes == before
