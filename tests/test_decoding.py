"""Every way of decoding that transformers offers, bit for bit, with everything on NVMe, exact and quantized."""

import copy
import random
import time
from threading import Thread

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from nvme_cache import OffloadedNVMeCache, io
from nvme_cache.arguments import cache_argument
from nvme_cache.transfer import HostTransfer

from .conftest import FAMILIES, assert_parity, exact_and_int8, prompt, stock_for, tiny_hybrid, tiny_model, tokens

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


@exact_and_int8
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modes(mode, family, make_cache):
    model = tiny_model(family)
    cache = make_cache(config=model.config, block_size=16)
    expected = tokens(model, prompt(60), stock_for(cache, model.config), **MODES[mode])
    assert torch.equal(tokens(model, prompt(60), cache, **MODES[mode]), expected)


@exact_and_int8
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_implementations(attention, family, make_cache):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    assert_parity(model, make_cache(config=model.config, block_size=16), 60, 2)


def test_flex_attention_over_many_blocks(make_cache):
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    assert_parity(model, make_cache(config=model.config, block_size=16), 300, new_tokens=3)


@exact_and_int8
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])  # Gemma's assistants ask the hub for a tokenizer
def test_assisted(family, attention, quantization, make_cache):
    model, assistant = tiny_model(family), tiny_model(family, num_hidden_layers=2)
    for either in (model, assistant):
        either.set_attn_implementation(attention)
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    # Exact, what it would say alone; quantized, what is sealed when depends on how many tokens come at once.
    expected = tokens(model, prompt(60), stock, assistant_model=assistant if quantization else None)
    assert torch.equal(tokens(model, prompt(60), cache, assistant_model=assistant), expected)


@exact_and_int8
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_guesses_beyond_a_sliding_window(family, attention, quantization, make_cache):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    repeating = prompt(20).repeat(1, 4)
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    # Exact, what it would say without guesses.
    expected = tokens(model, repeating, stock, prompt_lookup_num_tokens=3 if quantization else None)
    assert torch.equal(tokens(model, repeating, cache, prompt_lookup_num_tokens=3), expected)


@exact_and_int8
@pytest.mark.parametrize("whole", [True, False], ids=["whole sequence", "new tokens and a mask over all"])
def test_several_turns_on_one_cache(whole, make_cache):
    model = tiny_model()
    ours = make_cache(config=model.config, block_size=16)
    stock = stock_for(ours, model.config)
    sequences = [prompt(40), prompt(40)]
    for turn in range(5):
        for i, cache in enumerate((ours, stock)):
            history = torch.cat([sequences[i], prompt(11 + turn) + turn], dim=1)
            new = history if whole or not turn else history[:, cache.get_seq_length() :]
            output = tokens(model, new, cache, attention_mask=torch.ones_like(history), max_new_tokens=9)
            sequences[i] = output if whole or not turn else torch.cat([history, output[:, new.shape[1] :]], dim=1)
        assert torch.equal(*sequences)


@exact_and_int8
@pytest.mark.parametrize("copies", ["crop", "deepcopy"])
def test_one_prefix_and_several_suffixes(copies, make_cache):
    model = tiny_model()
    prefix = prompt(70)
    ours = make_cache(config=model.config, block_size=16)
    stock = stock_for(ours, model.config)
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


@exact_and_int8
def test_a_warm_cache_repeated_for_beams(make_cache):
    model = tiny_model()
    ours, results = make_cache(config=model.config, block_size=16), []
    for cache in (ours, stock_for(ours, model.config)):
        with torch.no_grad():
            model(prompt(50), **{cache_argument(model): cache})
        cache.batch_repeat_interleave(4)
        results.append(tokens(model, torch.cat([prompt(50), prompt(3)], dim=1), cache, num_beams=4))
    assert torch.equal(*results)


@exact_and_int8
def test_generating_in_another_thread_with_a_streamer(make_cache):
    class Collector(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            pass

    model = tiny_model()
    streamer, cache = Collector(), make_cache(config=model.config, block_size=16)
    expected = tokens(model, prompt(60), stock_for(cache, model.config))
    for _ in range(2):  # two threads one after the other may share a cache
        thread = Thread(target=tokens, args=(model, prompt(60), cache), kwargs={"streamer": streamer})
        thread.start()
        thread.join()
        cache.reset()
    assert streamer.seen == expected[0].tolist() * 2


@exact_and_int8
def test_autocast_mixes_dtypes_as_concatenation_does(make_cache):
    model = tiny_model()
    ids, results = prompt(60), []
    ours = make_cache(config=model.config, block_size=16)
    for cache in (ours, stock_for(ours, model.config)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            first = model(ids[:, :50], **{cache_argument(model): cache}).logits
        with torch.no_grad():
            second = model(ids[:, 50:], **{cache_argument(model): cache}).logits
        results.append((first, second, cache.layers[0].keys, cache.layers[0].values))
    for ours, stock in zip(*results, strict=True):
        assert ours.dtype == stock.dtype
        assert torch.equal(ours, stock)


@exact_and_int8
@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch_goes_on_with_a_longer_mask(family, make_cache):
    model, results = tiny_model(family), []
    mask = torch.ones(3, 60, dtype=torch.long)
    mask[1, :9], mask[2, :30] = 0, 0
    ours = make_cache(config=model.config, block_size=16)
    for cache in (ours, stock_for(ours, model.config)):
        with torch.no_grad():
            logits = []
            for start, end in ((0, 40), (40, 57), (57, 58), (58, 60)):
                ids = prompt(60, 3)[:, start:end]
                logits.append(model(ids, attention_mask=mask[:, :end], **{cache_argument(model): cache}).logits)
        results.append(torch.cat(logits, dim=1))
    assert torch.equal(*results)


@pytest.fixture
def slow_drive(monkeypatch):
    """Delays where the drive is asked and where blocks are copied: nothing may rest on either having been fast."""
    chance = random.Random(0)

    def delay(owner, name, longest):
        original = getattr(owner, name)

        def delayed(*arguments):
            time.sleep(chance.choice([0, 0, 0, longest]))
            original(*arguments)

        monkeypatch.setattr(owner, name, delayed)

    delay(io, "read_all", 0.005)
    delay(io, "write_all", 0.2)  # longer than a step takes
    delay(HostTransfer, "copy", 0.005)


@exact_and_int8
@pytest.mark.parametrize("mode", ["greedy", "beams", "prompt lookup", "chunks of 7"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_drives_and_threads_may_be_slow_at_any_moment(mode, attention, slow_drive, make_cache):
    model = tiny_model()
    model.set_attn_implementation(attention)
    cache = make_cache(config=model.config, block_size=16, host_budget=2 * 4096 * 4)
    expected = tokens(model, prompt(60), stock_for(cache, model.config), **MODES[mode])
    assert torch.equal(tokens(model, prompt(60), cache, **MODES[mode]), expected)


@exact_and_int8
def test_a_slow_drive_under_a_hybrid_step_by_step(slow_drive, make_cache):
    model = tiny_hybrid()
    assert_parity(model, make_cache(config=model.config, block_size=16), 60, 2, new_tokens=64)
