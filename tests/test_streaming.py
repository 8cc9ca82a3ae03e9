"""Models that attend with "nvme_streaming": the same tokens, and nothing laid out that need not be."""

import copy
import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from typing import ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)

import nvme_cache
from nvme_cache import ConfigurationError, OffloadedNVMeCache, ShardCorruptedError
from nvme_cache.arguments import cache_argument
from nvme_cache.attention import STREAMING, streaming_attention
from nvme_cache.attention.softmax import OnlineSoftmax
from nvme_cache.handles import Handle
from nvme_cache.shards import Shard
from nvme_cache.slots import Lease, Slot, SlotPool
from nvme_cache.transfer import HostTransfer

from .conftest import (
    SIZES,
    Attention,
    exact_and_int8,
    generate,
    prompt,
    tiers,
    tiny_hybrid,
    tiny_model,
    tiny_t5,
    tokens,
)


def states(length, batch_size=1):
    return torch.randn(2, batch_size, 2, length, 16).unbind(0)


def streamed(model):
    model.set_attn_implementation(STREAMING)
    return model


def assert_close(ours, stock):
    """Of two generations: the same tokens, and logits that differ as two orders of adding up do."""
    assert torch.equal(ours.tokens, stock.tokens)
    assert (ours.logits - stock.logits).abs().max() < 2e-5 * stock.logits.abs().max()


def assert_streamed(model, cache, *args, **options):
    stock = generate(model, DynamicCache(config=model.config), *args, **options)
    ours = generate(streamed(model), cache, *args, **options)
    assert_close(ours, stock)


def model_of(model_class, config_class, **overrides):
    torch.manual_seed(0)
    model = model_class(config_class(**(SIZES | {"pad_token_id": 0} | overrides))).eval()
    model.generation_config.eos_token_id = None
    return model


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen3": lambda: tiny_model("qwen3"),
    "gemma3": lambda: tiny_model("gemma3"),
    "gemma2": lambda: model_of(  # softcap
        Gemma2ForCausalLM,
        Gemma2Config,
        attn_logit_softcapping=1.0,
        query_pre_attn_scalar=16,
        sliding_window=24,
        attn_implementation="eager",  # older transformers attend with "sdpa", which leaves the cap out
    ),
    "gpt_oss": lambda: model_of(  # sinks
        GptOssForCausalLM, GptOssConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=24
    ),
    "hybrid": tiny_hybrid,
}


class TestTokens:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("with_config", [True, False])
    def test_families(self, name, with_config, make_cache):
        model = MODELS[name]()
        if not with_config and name == "hybrid":
            pytest.skip("a cache for such a model needs the config")
        cache = make_cache(config=model.config if with_config else None, block_size=8)
        assert_streamed(model, cache, 60, batch_size=2)
        assert any(layer.is_streamed for layer in cache._paged_layers().values())
        assert cache.memory_usage()["nvme"] > 0

    @pytest.mark.parametrize("tier", ["nvme", "host", "device", "mixed"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 16}],
        ids=str,
    )
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_modes_and_tiers(self, tier, options, batch_size, make_cache):
        if "prefill_chunk_size" in options and batch_size > 1:
            options = options | {"prefill_chunk_size": 20}
        model = tiny_model()
        cache = make_cache(config=model.config, block_size=8, **tiers(40_000)[tier])
        assert_streamed(model, cache, 70, batch_size=batch_size, **options)

    @pytest.mark.parametrize("lookup", [2, 5])
    def test_prompt_lookup(self, lookup, make_cache):
        model = tiny_model()
        ids = prompt(20).repeat(1, 3)
        stock = tokens(model, ids, DynamicCache(config=model.config), prompt_lookup_num_tokens=lookup)
        cache = make_cache(config=model.config, block_size=8)
        assert torch.equal(tokens(streamed(model), ids, cache, prompt_lookup_num_tokens=lookup), stock)

    def test_an_assistant(self, make_cache):
        model, assistant = tiny_model(), tiny_model(num_hidden_layers=2)
        stock = tokens(model, prompt(50), DynamicCache(config=model.config))
        cache = make_cache(config=model.config, block_size=8)
        assert torch.equal(tokens(streamed(model), prompt(50), cache, assistant_model=assistant), stock)

    def test_several_turns_and_a_fork(self, make_cache):
        model = tiny_model()
        stock = DynamicCache(config=model.config)
        first = tokens(model, prompt(50), stock)
        longer = torch.cat([first, prompt(9)], dim=1)
        expected = tokens(model, longer, stock)
        cache = make_cache(config=model.config, block_size=8)
        assert torch.equal(tokens(streamed(model), prompt(50), cache), first)
        with cache.fork() as fork:
            assert torch.equal(tokens(model, longer, fork), expected)
        assert torch.equal(tokens(model, longer, cache), expected)

    def test_a_snapshot(self, make_cache, tmp_path):
        model = tiny_model()
        stock = DynamicCache(config=model.config)
        first = tokens(model, prompt(50), stock)
        expected = tokens(model, torch.cat([first, prompt(9)], dim=1), stock)
        cache = make_cache(config=model.config, block_size=8)
        tokens(streamed(model), prompt(50), cache)
        cache.save_pretrained(tmp_path / "saved", model=model)
        for budget in (0, 1 << 30):  # read from the drive, and kept in memory once read
            with OffloadedNVMeCache.from_pretrained(tmp_path / "saved", model=model, host_budget=budget) as opened:
                assert torch.equal(tokens(model, torch.cat([first, prompt(9)], dim=1), opened), expected)

    @pytest.mark.parametrize("quantization", ["int8", "int4"])
    @pytest.mark.parametrize("tier", ["nvme", "host", "mixed"])
    def test_quantized_blocks_are_those_that_are_laid_out_elsewhere(self, tier, make_cache):
        model = tiny_model()
        options = {"config": model.config, "block_size": 8, **tiers(12_000)[tier]}
        laid_out = generate(model, make_cache(**options), 70, batch_size=2)
        assert_close(generate(streamed(model), make_cache(**options), 70, batch_size=2), laid_out)

    def test_an_encoder_decoder(self, make_cache):
        model = tiny_t5()
        stock = model.generate(prompt(30), max_new_tokens=40)
        model.set_attn_implementation(STREAMING)
        with nvme_cache.enable(model, offload_dir=make_cache().offload_path.parent, block_size=4, host_budget=0):
            assert torch.equal(model.generate(prompt(30), max_new_tokens=40), stock)

    def test_half_precision_is_as_near_to_the_truth_as_stock_attention(self, make_cache):
        exact = tiny_model()
        truth = generate(exact, DynamicCache(config=exact.config), 200, new_tokens=1).logits
        errors = {}
        for name in ("sdpa", STREAMING):
            model = tiny_model(dtype=torch.bfloat16)
            model.set_attn_implementation(name)
            cache = make_cache(config=model.config, block_size=16)
            errors[name] = (generate(model, cache, 200, new_tokens=1).logits.float() - truth).abs().mean()
        assert errors[STREAMING] < 1.5 * errors["sdpa"]


class TestReading:
    """What moves, as the meter counts it."""

    @exact_and_int8
    def test_a_step_reads_every_block_once(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=16)
        with torch.no_grad():
            model(prompt(200), **{cache_argument(model): cache})
            for _ in range(3):  # what is fetched ahead settles
                model(prompt(1), **{cache_argument(model): cache})
            before, stored = cache._pager.meter.read_bytes, cache.memory_usage()["nvme"]
            for _ in range(4):
                model(prompt(1), **{cache_argument(model): cache})
        assert cache._pager.meter.read_bytes - before == 4 * stored

    def test_beams_read_what_they_share_once(self, make_cache):
        model = streamed(tiny_model())
        read, written = {}, {}
        for beams in (1, 4):
            cache = make_cache(config=model.config, block_size=16)
            tokens(model, prompt(200), cache, num_beams=beams, max_new_tokens=6)
            cache._pager.flush()
            read[beams], written[beams] = cache._pager.meter.read_bytes, cache._pager.meter.written_bytes
        assert read[4] == read[1] > 0
        assert written[4] == written[1] > 0

    def test_a_chunk_of_a_prompt_reads_the_past_once(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=8)
        with torch.no_grad():
            for _ in range(2):
                model(prompt(64), **{cache_argument(model): cache})
            cache._pager.flush()
            before, stored = cache._pager.meter.read_bytes, cache.memory_usage()["nvme"]
            cache._feed.abandon()
            model(prompt(64), **{cache_argument(model): cache})
            ahead = sum(segment.nbytes for segment, _ in cache._feed._ahead)
        assert cache._pager.meter.read_bytes - before - ahead == stored

    def test_layers_that_share_keys_and_values_read_them_once(self, make_cache):
        model = model_of(
            Gemma3nForCausalLM, Gemma3nTextConfig, num_hidden_layers=8, num_kv_shared_layers=4, sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * 4, vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=16, activation_sparsity_pattern=[0.0] * 8,
        )  # fmt: skip
        stock = generate(model, DynamicCache(config=model.config), 100)
        cache = make_cache(config=model.config, block_size=8)
        assert_close(generate(streamed(model), cache, 100), stock)
        # The one that is shared is laid out for all, as without streaming; the other is read a segment at a time.
        assert [layer.can_stream for layer in cache._paged_layers().values()] == [True, False]
        before, stored = cache._pager.meter.read_bytes, cache.memory_usage()["nvme"]
        with torch.no_grad():
            for _ in range(4):
                model(prompt(1), **{cache_argument(model): cache})
        assert cache._pager.meter.read_bytes - before <= 4 * stored

    def test_resident_blocks_are_read_where_they_are(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=1024, host_budget=1 << 30)
        with torch.no_grad():
            model(prompt(8192), **{cache_argument(model): cache})
            model(prompt(1), **{cache_argument(model): cache})
            copied = cache._pager.meter.copied_bytes
            model(prompt(1), **{cache_argument(model): cache})
        assert cache.memory_usage()["host"] >= 8 << 20
        assert cache._pager.meter.copied_bytes == copied == 0

    @pytest.mark.parametrize("is_filled", [False, True])
    def test_two_threads_share_a_read_if_attention_waits_for_it(self, is_filled, make_cache, monkeypatch):
        monkeypatch.setattr("nvme_cache.fetch._WORTH_SPLITTING", 1)
        monkeypatch.setattr(Lease, "is_filled", is_filled)
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=64, io_threads=2, prefetch_depth=2)
        read, parts = Shard.read, []

        def counted(shard, sections, *args):
            parts.append(len(sections))
            return read(shard, sections, *args)

        monkeypatch.setattr(Shard, "read", counted)
        with torch.no_grad():
            for length in (200, 1, 1, 1):
                cache._pager.flush()
                parts.clear()
                model(prompt(length), **{cache_argument(model): cache})
        assert (2 in parts) == is_filled  # keys and values in one go

    def test_a_lease_is_filled_when_all_tasks_are_done(self):
        slot, tasks = Slot(HostTransfer()), [Future(), Future()]
        lease = Lease(slot, slot.tenancy, SlotPool(HostTransfer()), [])
        assert lease.is_filled
        slot.tasks = tasks
        for task in tasks:
            assert not lease.is_filled
            task.set_result(None)
        assert lease.is_filled

    def test_waiting_is_counted_as_the_tax_and_attending_is_not(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=8)
        tokens(model, prompt(300), cache, max_new_tokens=30)
        cache._pager.meter.settle(wait=True)
        steps = [step for step in cache._pager.meter.steps if not step.is_prefill][1:-1]
        assert all(0 < sum(step.tax_s.values()) < step.wall_s for step in steps)
        assert sum(step.read_bytes for step in steps) > 0
        assert "a token" in str(cache.tax)


class TestHandles:
    def test_look_like_what_they_stand_for(self, make_cache):
        cache = make_cache(block_size=8)
        attention = Attention(cache)
        with torch.no_grad():
            attention(*states(50))
            keys, values = attention(*states(3))
        for handle in (keys, values):
            assert isinstance(handle, Handle)
            assert (handle.shape, handle.dtype, handle.device.type) == ((1, 2, 53, 16), torch.float32, "cpu")
            assert "53" in repr(handle)
        assert cache.layers[0].is_streamed

    def test_any_operation_gives_what_is_held_and_says_so_once(self, make_cache, caplog):
        cache, stock = make_cache(block_size=8), DynamicCache()
        attention = Attention(cache)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "nvme_cache"):
            for length in (50, 3, 1, 20, 1):
                new = states(length)
                expected = stock.update(*new, 0)
                for ours, theirs in zip(attention(*new), expected, strict=True):
                    assert torch.equal(ours + 0, theirs)
        assert [record.message.split()[0] for record in caplog.records] == ["Attention"]
        assert not cache.layers[0].is_streamed  # laid out whole from then on

    def test_stay_what_they_are_whatever_becomes_of_the_layer(self, make_cache):
        cache, stock = make_cache(block_size=8), DynamicCache()
        attention = Attention(cache)
        kept = []
        with torch.no_grad():
            for length, crop in ((50, 0), (3, -2), (4, -30), (9, 0), (1, -1), (1, 0)):
                new = states(length)
                expected = [part.clone() for part in stock.update(*new, 0)]
                kept.append((attention(*new), expected))
                cache.crop(crop)
                stock.crop(crop)
            cache.reorder_cache(torch.tensor([0]))
            cache.reset()
            for handles, expected in kept[1:]:
                assert isinstance(handles[0], Handle)
                for ours, theirs in zip(handles, expected, strict=True):
                    assert torch.equal(ours + 0, theirs)

    def test_gradients_are_not_lost(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=8)
        with torch.no_grad():
            model(prompt(50), **{cache_argument(model): cache})
        stock = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(50), **{cache_argument(model): stock})
        gradients = []
        for held in (cache, stock):
            model.zero_grad()
            model(prompt(4), **{cache_argument(model): held}).logits.square().sum().backward()
            gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        assert torch.allclose(*gradients, rtol=1e-4)
        assert gradients[0].abs().max() > 0

    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
    def test_gradients_of_queries_alone_are_right(self, name, make_cache):
        model = MODELS[name]()
        stock_attention = model.config._attn_implementation
        model.requires_grad_(False)
        weight = model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
        gradients = []
        for attention in (stock_attention, STREAMING):
            model.set_attn_implementation(attention)
            held = DynamicCache(config=model.config) if attention != STREAMING else make_cache(block_size=8)
            with torch.no_grad():
                model(prompt(50), **{cache_argument(model): held})
            weight.grad = None
            model(prompt(4), **{cache_argument(model): held}).logits.square().sum().backward()
            gradients.append(weight.grad.clone())
        assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6 * gradients[0].abs().max())
        assert gradients[0].abs().max() > 0

    @pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
    def test_training_without_a_cache_is_what_it_was(self, name):
        model = MODELS[name]()
        gradients = []
        for attention in ("eager", STREAMING):
            model.set_attn_implementation(attention)
            model.zero_grad()
            model(prompt(40, rows=2), use_cache=False).logits.square().sum().backward()
            gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6 * gradients[0].abs().max())

    def test_dropout_is_not_lost(self, make_cache):
        model = streamed(tiny_model(attention_dropout=0.9))
        cache = make_cache(config=model.config, block_size=8)
        with torch.no_grad():
            model(prompt(50), **{cache_argument(model): cache})
            model.train()
            first = model(prompt(1), **{cache_argument(model): cache}).logits
            cache.crop(-1)
            assert not torch.equal(model(prompt(1), **{cache_argument(model): cache}).logits, first)

    def test_changed_in_place_they_are_attended_to_as_changed(self, make_cache):
        cache = make_cache(block_size=8)
        attention = Attention(cache)
        with torch.no_grad():
            attention(*states(50))
            keys, values = attention(*states(1))
            values.mul_(0)
            output, _ = streaming_attention(attention, torch.randn(1, 4, 1, 16), keys, values, None)
        assert not output.any()

    def test_of_keys_alone_they_are_laid_out(self, make_cache):
        """Models that reshape values and attend with the keys as they came."""
        cache = make_cache(block_size=8)
        attention = Attention(cache)
        queries = torch.randn(1, 4, 1, 16)
        with torch.no_grad():
            attention(*states(50))
            keys, values = attention(*states(1))
            doubled = values * 2
            output, _ = streaming_attention(attention, queries, keys, doubled, None)
            softmax = OnlineSoftmax(queries, 2, 0.25, 51)
            softmax.add(keys + 0, doubled, 0, None)
        assert torch.allclose(output, softmax.result())


class TestMasks:
    """A mask of one's own, `[batch, 1 or heads, queries, keys]`."""

    def logits(self, model, held, mask, length=48, new=3):
        with torch.no_grad():
            model(prompt(length, 2), **{cache_argument(model): held})
            return model(prompt(new, 2), attention_mask=mask, **{cache_argument(model): held}).logits

    @pytest.mark.parametrize("new", [3, 600])
    @pytest.mark.parametrize(
        "shape", [(2, 1, True, True), (1, 4, True, True), (2, 1, False, True), (2, 1, True, False)]
    )
    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_counts_as_elsewhere(self, kind, shape, new, make_cache):
        model = tiny_model()
        rows, heads, per_query, per_key = shape
        mask = torch.rand(rows, heads, new if per_query else 1, 48 + new if per_key else 1) > (0.5 if per_key else -1)
        mask[..., 0] = True  # no query is left without any key
        if kind == "float":
            mask = torch.where(mask, torch.randn(mask.shape), torch.finfo(torch.float32).min)
        expected = self.logits(model, DynamicCache(config=model.config), mask, new=new)
        ours = self.logits(streamed(model), make_cache(config=model.config, block_size=8), mask, new=new)
        assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()

    @pytest.mark.parametrize(
        "mask",
        [
            torch.ones(2, 1, 3, 48, dtype=torch.bool),
            torch.ones(2, 1, 3, 60, dtype=torch.bool),
            torch.ones(2, 1, 3, 51, dtype=torch.long),
        ],
        ids=["too short", "too long", "neither bool nor float"],
    )
    def test_of_another_shape_or_kind_is_refused(self, mask, make_cache):
        model = streamed(tiny_model())
        with pytest.raises(ValueError, match="not for 3 queries and 51 keys"):
            self.logits(model, make_cache(config=model.config, block_size=8), mask)


class TestModelsThatDoMore:
    def test_latent_attention_loses_only_the_benefit(self, make_cache, caplog):
        model = model_of(
            DeepseekV3ForCausalLM, DeepseekV3Config, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
            qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size=32, num_key_value_heads=4, first_k_dense_replace=1,
        )  # fmt: skip
        cache = make_cache(config=model.config, block_size=8)
        with caplog.at_level(logging.WARNING, "nvme_cache"):
            assert_streamed(model, cache, 60, batch_size=2)
        assert not any(layer.can_stream for layer in cache._paged_layers().values())
        said = [record.message for record in caplog.records if record.name.startswith("nvme_cache")]
        assert len(said) == 1 and said[0].startswith("DeepseekV3Attention")


class TestBrokenWorlds:
    def test_a_damaged_shard_is_refused_and_the_forward_taken_back(self, make_cache):
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=8)
        with torch.no_grad():
            model(prompt(100), **{cache_argument(model): cache})
            model(prompt(1), **{cache_argument(model): cache})
            cache._pager.flush()
            cache._feed.abandon()
            shard = cache.layers[2].segments[0].runs[0].blocks
            content = bytearray(shard.path.read_bytes())
            content[shard.sections[1][0].offset + 5] ^= 1
            shard.path.write_bytes(content)
            with pytest.raises(ShardCorruptedError, match="layer 2"):
                for _ in range(3):  # what was fetched before the damage may serve once more
                    length = cache.get_seq_length()
                    model(prompt(1), **{cache_argument(model): cache})
            assert cache.get_seq_length() == length
            content[shard.sections[1][0].offset + 5] ^= 1
            shard.path.write_bytes(content)
            stock = DynamicCache(config=model.config)
            model.set_attn_implementation("sdpa")
            for ids in (prompt(100), *[prompt(1)] * (length - 99)):
                expected = model(ids, **{cache_argument(model): stock}).logits
            ours = model(prompt(1), **{cache_argument(streamed(model)): cache}).logits
        assert torch.allclose(ours[:, -1], expected[:, -1], atol=1e-5)

    def test_after_an_interrupt_segments_are_fetched_ahead_as_before(self, make_cache, monkeypatch):
        monkeypatch.setattr("nvme_cache.pager.takes_all_cores", lambda: True)
        model = streamed(tiny_model())
        cache = make_cache(config=model.config, block_size=64, prefetch_depth=1)
        with torch.no_grad():
            for length in (200, 1, 1):
                model(prompt(length), **{cache_argument(model): cache})
            assert len(cache._feed._ahead) == 1
            for _ in range(3):
                with monkeypatch.context() as interrupted:

                    def interrupt(*_):
                        raise KeyboardInterrupt

                    interrupted.setattr(Shard, "verify", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        model(prompt(1), **{cache_argument(model): cache})
                for _ in range(2):
                    cache._pager.flush()  # what the interrupt left under way is done
                    model(prompt(1), **{cache_argument(model): cache})
                assert len(cache._feed._ahead) == 1

    def test_a_closed_cache_says_so(self, make_cache):
        cache = make_cache(block_size=8)
        attention = Attention(cache)
        with torch.no_grad():
            attention(*states(50))
            keys, _ = attention(*states(1))
        cache.close()
        with pytest.raises(nvme_cache.CacheClosedError):
            keys.streamed.read(lambda *portion: None)


class TestChoosing:
    def test_enable_switches_attention_on_and_off_again(self, offload_dir):
        model = tiny_model()
        stock = tokens(model, prompt(60), None)
        with nvme_cache.enable(model, attention="streaming", offload_dir=offload_dir, block_size=8, host_budget=0):
            assert model.config._attn_implementation == STREAMING
            assert torch.equal(tokens(model, prompt(60), None), stock)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(tokens(model, prompt(60), None), stock)

    def test_switched_off_in_any_order(self, offload_dir):
        model = tiny_model()
        options = {"attention": "streaming", "offload_dir": offload_dir}
        first, second = (nvme_cache.enable(model, **options) for _ in range(2))
        first.disable()
        assert model.config._attn_implementation == STREAMING
        second.disable()
        assert model.config._attn_implementation == "sdpa"
        first, second = (nvme_cache.enable(model, **options) for _ in range(2))
        second.disable()
        assert model.config._attn_implementation == STREAMING
        first.disable()
        assert model.config._attn_implementation == "sdpa"

    def test_another_attention_is_refused(self):
        with pytest.raises(ConfigurationError, match="streaming"):
            nvme_cache.enable(tiny_model(), attention="flash")

    def test_the_first_cache_makes_the_name_known(self, tmp_path):
        program = """
            import sys
            import nvme_cache
            from transformers import LlamaConfig, LlamaForCausalLM
            assert "transformers.modeling_utils" in sys.modules
            from transformers import AttentionInterface, AttentionMaskInterface
            assert "nvme_streaming" not in AttentionInterface()
            nvme_cache.OffloadedNVMeCache(offload_dir=sys.argv[1]).close()
            assert "nvme_streaming" in AttentionInterface() and "nvme_streaming" in AttentionMaskInterface()
            config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
            LlamaForCausalLM(config).set_attn_implementation("nvme_streaming")
            LlamaForCausalLM._from_config(config, attn_implementation="nvme_streaming")
        """
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr

    def test_attention_without_our_cache_is_stock_attention(self):
        model = tiny_model()
        stock = generate(model, DynamicCache(config=model.config), 60, batch_size=2)
        ours = generate(streamed(model), DynamicCache(config=model.config), 60, batch_size=2)
        assert_close(ours, stock)

    def test_without_our_attention_nothing_is_streamed(self, make_cache):
        model = tiny_model()
        cache = make_cache(config=model.config, block_size=8)
        generate(model, cache, 60)
        assert not any(layer.is_streamed for layer in cache.layers)


PEAK = """
    import sys
    from pathlib import Path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from nvme_cache import OffloadedNVMeCache

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    what, folder, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=128, vocab_size=256, max_position_embeddings=1 << 20)
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    options = {"config": config, "offload_dir": folder, "device_budget": 0, "host_budget": 0}
    with torch.inference_mode():
        if what == "save":
            with OffloadedNVMeCache(**options) as cache:
                for _ in range(length // 8192):
                    cache.update(*torch.randn(2, 1, 8, 8192, 128, dtype=torch.bfloat16), 0)
                cache.save_pretrained(folder + "/saved", token_ids=torch.ones(1, length, dtype=torch.long))
        else:
            def steps(cache):
                for _ in range(4):
                    model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)

            with OffloadedNVMeCache(**options) as cache:
                model.set_attn_implementation("nvme_streaming")
                steps(cache)
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            with OffloadedNVMeCache.from_pretrained(folder + "/saved", config=config, host_budget=0) as cache:
                steps(cache)
                assert cache._pager.meter.read_bytes >= 4 * length * 4096
            print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("layer_mib", [512, 1024])
def test_memory_does_not_grow_with_a_layer(layer_mib, offload_dir):
    """4 KiB a token, as in Llama-3.1-8B: 131,072 tokens are 512 MiB."""

    def run(what):
        program = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PEAK), what, str(offload_dir)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run([*program, str(layer_mib * 256)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("save")
    assert int(run("decode")) < 64 << 20


class Machine(RuleBasedStateMachine):
    """One streamed layer beside transformers' own: after anything that may happen, attention sees the same."""

    options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.cache = OffloadedNVMeCache(block_size=4, device_budget=0, prefetch_depth=1, **self.options)
        self.stock = DynamicCache()
        self.attention = Attention(self.cache)
        self.batch_size = self.stock_length = 0
        self.handles = None

    def teardown(self):
        self.cache.close()

    @rule(length=st.integers(1, 11), batch_size=st.integers(1, 3))
    def update(self, length, batch_size):
        self.batch_size = self.batch_size or batch_size
        new = states(length, self.batch_size)
        with torch.no_grad():
            self.expected = [part.clone() for part in self.stock.update(*(part.clone() for part in new), 0)]
            self.handles = self.attention(*new)

    def held(self):
        return self.stock.get_seq_length()

    @precondition(held)
    @rule(count=st.integers(1, 9))
    def crop(self, count):
        self.cache.crop(-count)
        self.stock.crop(-count)

    @precondition(held)
    @rule(data=st.data())
    def reorder(self, data):
        rows = st.lists(st.integers(0, self.batch_size - 1), min_size=self.batch_size, max_size=self.batch_size)
        order = torch.tensor(data.draw(rows))
        self.cache.reorder_cache(order)
        self.stock.reorder_cache(order)

    @precondition(held)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        if self.batch_size * repeats <= 6:
            self.cache.batch_repeat_interleave(repeats)
            self.stock.batch_repeat_interleave(repeats)
            self.batch_size *= repeats

    @precondition(held)
    @rule()
    def copy(self):
        copied = copy.deepcopy(self.cache)
        self.cache.close()
        self.cache = self.attention.cache = copied
        self.handles = None

    @invariant()
    def attention_sees_what_is_held(self):
        if self.handles is None:
            return
        found = []
        if not isinstance(self.handles[0], Handle):
            assert all(map(torch.equal, self.handles, self.expected))
            return
        (handles, self.handles) = (self.handles, None)
        rebuilt = [torch.full_like(part, torch.nan) for part in self.expected]

        def visit(keys, values, start, rows):
            found.append(keys.shape[2])
            for target, part in zip(rebuilt, (keys, values), strict=True):
                target[:, :, start : start + part.shape[2]] = part if rows is None else part[rows]

        handles[0].streamed.read(visit)
        assert sum(found) == self.expected[0].shape[2]
        assert all(map(torch.equal, rebuilt, self.expected))
        assert all(torch.equal(handle + 0, part) for handle, part in zip(handles, self.expected, strict=True))
        self.cache.layers[0].can_stream = True


class TestOnNVMe(Machine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


class HalfInMemory(Machine):
    options: ClassVar[dict] = {"host_budget": 64 * 2048}


class TestHalfInMemory(HalfInMemory.TestCase):
    settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
