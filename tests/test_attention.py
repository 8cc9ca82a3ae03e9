"""Attention in portions against attention at once: exact, whatever the shapes, the masks and the order."""

import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from nvme_cache.attention import kernels, streaming_attention, streaming_mask
from nvme_cache.attention.masks import LazyMask, MaskRule
from nvme_cache.attention.softmax import OnlineSoftmax

CPU = torch.device("cpu")


def reference(queries, keys, values, scaling, *, mask=None, bias=None, softcap=None, sinks=None):
    """Attention at once in float64, by the book; `mask` is bool or additive, heads are not yet repeated."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, 1) for part in (keys, values))
    scores = queries.double() @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ values).transpose(1, 2)


def causal(q_length, kv_length):
    return torch.arange(kv_length) <= torch.arange(q_length)[:, None] + (kv_length - q_length)


def in_portions(softmax, keys, values, cuts, order=None):
    bounds = sorted({0, keys.shape[2], *cuts})
    portions = list(pairwise(bounds))
    for index in order or range(len(portions)):
        start, end = portions[index]
        softmax.add(keys[:, :, start:end], values[:, :, start:end], start, None)
    return softmax


@st.composite
def problems(draw):
    """Shapes, and what is asked for beside plain attention."""
    seed = draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    batch, heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = draw(st.sampled_from([8, 16]))
    value_width = draw(st.sampled_from([8, 16]))
    q_length = draw(st.sampled_from([1, 2, 5, 33]))
    kv_length = q_length + draw(st.integers(0, 90))

    def random(*shape):
        return torch.randn(shape, generator=generator)

    problem = {
        "queries": random(batch, heads * groups, q_length, width),
        "keys": random(batch, heads, kv_length, width),
        "values": random(batch, heads, kv_length, value_width),
        "scaling": draw(st.sampled_from([0.1, 0.5])),
    }
    mask_heads = draw(st.sampled_from([1, heads * groups]))
    kind = draw(st.sampled_from(["causal", "bool", "float", "none"]))
    mask = None
    if kind == "bool":
        mask = random(draw(st.sampled_from([1, batch])), mask_heads, q_length, kv_length) > draw(
            st.sampled_from([0.0, 2.5])
        )
    elif kind == "float":
        mask = random(batch, mask_heads, q_length, kv_length)
    problem["mask"], problem["is_causal"] = mask, kind == "causal"
    problem["bias"] = random(1, heads * groups, q_length, kv_length) if draw(st.booleans()) else None
    problem["softcap"] = draw(st.sampled_from([None, 2.0]))
    problem["sinks"] = random(heads * groups) if draw(st.booleans()) else None
    cuts = draw(st.lists(st.integers(0, kv_length), max_size=4))
    return problem, cuts, draw(st.randoms(use_true_random=False))


@settings(max_examples=120, deadline=None)
@given(problems(), st.booleans())
def test_portions_in_any_order_add_up(drawn, tiny_limits):
    problem, cuts, random = drawn
    limits = kernels._STRETCH_BYTES, kernels._SCORES_BYTES, kernels._GRANULE
    if tiny_limits:  # so that stretches and queries are cut up too
        kernels._STRETCH_BYTES, kernels._SCORES_BYTES, kernels._GRANULE = 4096, 4096, 8
    try:
        keys, values, sinks, is_causal = (problem.pop(name) for name in ("keys", "values", "sinks", "is_causal"))
        queries, scaling = problem.pop("queries"), problem.pop("scaling")
        softmax = OnlineSoftmax(queries, keys.shape[1], scaling, keys.shape[2], is_causal=is_causal, **problem)
        order = list(range(len({0, keys.shape[2], *cuts}) - 1))
        random.shuffle(order)
        ours = in_portions(softmax, keys, values, cuts, order).result(sinks)
    finally:
        kernels._STRETCH_BYTES, kernels._SCORES_BYTES, kernels._GRANULE = limits
    if is_causal:
        problem["mask"] = causal(queries.shape[2], keys.shape[2])
    expected = reference(queries, keys, values, scaling, sinks=sinks, **problem)
    assert ours.shape == expected.shape
    assert torch.allclose(ours.double(), expected, atol=2e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_that_share_stored_ones_attend_as_if_each_had_its_own(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    stored, batch, q_length = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from([1, 4])),
    )
    rows = torch.tensor(data.draw(st.lists(st.integers(0, stored - 1), min_size=batch, max_size=batch)))
    keys, values = (torch.randn(stored, 2, 40, 8, generator=generator) for _ in range(2))
    queries = torch.randn(batch, 6, q_length, 8, generator=generator)
    mask = None
    if data.draw(st.booleans()):
        mask = torch.rand(data.draw(st.sampled_from([1, batch])), 1, q_length, 40, generator=generator) > 0.5
    softmax = OnlineSoftmax(queries, 2, 0.3, 40, mask=mask, is_causal=False)
    softmax.add(keys[:, :, :25], values[:, :, :25], 0, rows)
    softmax.add(keys[rows][:, :, 25:], values[rows][:, :, 25:], 25, None)
    expected = reference(queries, keys[rows], values[rows], 0.3, mask=mask)
    assert torch.allclose(softmax.result().double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_no_larger_than_that_of_stock_attention(dtype):
    """Root mean square against float64, over decode steps and chunks of random shapes, with and without padding."""
    generator = torch.Generator().manual_seed(0)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    ours, stock = [], []
    for trial in range(48):
        heads, groups, width = integer(1, 5), integer(1, 5), (32, 64, 128)[trial % 3]
        q_length = (1, 1, 7, 64)[trial % 4]
        kv_length = q_length + integer(1, 3000)
        queries = torch.randn(1, heads * groups, q_length, width, generator=generator).to(dtype) * (1, 3)[trial % 2]
        keys, values = (torch.randn(1, heads, kv_length, width, generator=generator).to(dtype) for _ in range(2))
        mask = causal(q_length, kv_length)
        wide_keys, wide_values = (part.repeat_interleave(groups, 1) for part in (keys, values))
        exact = torch.nn.functional.scaled_dot_product_attention(
            queries.double(), wide_keys.double(), wide_values.double(), attn_mask=mask
        )
        if q_length == 1:  # as transformers calls it
            found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        else:
            found = torch.nn.functional.scaled_dot_product_attention(queries, wide_keys, wide_values, attn_mask=mask)
        softmax = OnlineSoftmax(queries, heads, width**-0.5, kv_length)
        cuts = [integer(0, kv_length + 1) for _ in range(3)]
        mine = in_portions(softmax, keys, values, cuts).result().to(dtype).transpose(1, 2)
        for errors, output in ((ours, mine), (stock, found)):
            errors.append(((output.double() - exact).square().mean() / exact.square().mean()).sqrt().item())
    assert statistics.median(ours) <= statistics.median(stock)
    assert statistics.fmean(ours) <= statistics.fmean(stock)
    if dtype != torch.float32:  # where nothing is rounded but the result
        assert all(mine <= theirs for mine, theirs in zip(ours, stock, strict=True))


def test_autocast_rounds_nothing_in_between():
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, length, 64, generator=generator).bfloat16()
                             for heads, length in ((4, 1), (2, 3000), (2, 3000)))  # fmt: skip
    outputs = []
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs.append(streaming_attention(module, queries, keys, values, None, softcap=30.0)[0])
    assert torch.equal(*outputs)


def rule(q_length, kv_length, *, function=causal_mask_function, padding=None, batch=2, dtype=torch.bool):
    return MaskRule(batch, q_length, kv_length, kv_length - q_length, 0, function, padding, False, CPU, dtype)


def left_padded(lengths, kv_length):
    return torch.arange(kv_length) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("function", [causal_mask_function, sliding_window_causal_mask_function(9)])
@pytest.mark.parametrize("padding", [None, left_padded([0, 11], 60)])
@pytest.mark.parametrize("q_length", [1, 20, 60])
def test_tiles_of_a_rule_are_tiles_of_the_mask(function, padding, q_length):
    made = rule(q_length, 60, function=function, padding=padding)
    whole = sdpa_mask(2, q_length, 60, 60 - q_length, 0, function, padding, allow_is_causal_skip=False, device="cpu")
    assert torch.equal(made.whole, whole)
    for queries in (slice(0, q_length), slice(0, 1), slice(q_length // 2, q_length)):
        for keys in (slice(0, 60), slice(0, 10), slice(11, 40), slice(55, 60)):
            expected = whole[:, :, queries, keys]
            found = made.visible(queries, keys)
            if isinstance(found, bool):
                assert expected.all() if found else not expected.any()
            else:
                assert torch.equal(found, expected)
                assert expected.any() and not expected.all()


class TestLazyMask:
    def test_is_a_tensor_to_everyone(self):
        made = rule(20, 60, padding=left_padded([0, 11], 60))
        mask = LazyMask.by(made)
        assert (mask.shape, mask.dtype, mask.ndim) == ((2, 1, 20, 60), torch.bool, 4)
        assert "whole" not in vars(made)  # none of this laid it out
        assert torch.equal(mask & True, made.whole)
        assert torch.equal(torch.where(mask, 0.0, 1.0), torch.where(made.whole, 0.0, 1.0))
        assert torch.equal(mask[:, :, :, 7:30], made.whole[:, :, :, 7:30])

    def test_cutting_out_queries_makes_another(self):
        mask = LazyMask.by(rule(20, 60, padding=left_padded([0, 11], 60)))
        cut = mask[:, :, -5:, :]
        assert isinstance(cut, LazyMask) and cut.shape == (2, 1, 5, 60)
        assert "whole" not in vars(mask.rule) | vars(cut.rule)
        assert torch.equal(cut & True, mask.rule.whole[:, :, -5:])

    def test_for_models_that_add_it_it_is_a_float(self):
        made = rule(3, 9, dtype=torch.float16)
        expected = torch.where(rule(3, 9).whole, 0.0, torch.finfo(torch.float16).min).half()
        assert torch.equal(LazyMask.by(made) + 0, expected)


class TestStreamingMask:
    def test_there_is_none_where_stock_attention_needs_none(self):
        nothing = torch.ones(2, 60, dtype=torch.bool)
        for padding in (None, nothing):
            assert streaming_mask(2, 1, 60, q_offset=59, attention_mask=padding) is None
            assert streaming_mask(2, 60, 60, attention_mask=padding) is None
        assert streaming_mask(2, 1, 60, q_offset=59, attention_mask=left_padded([0, 3], 60)) is not None
        assert streaming_mask(2, 5, 60, q_offset=55) is not None
        assert streaming_mask(2, 1, 60, q_offset=59, local_size=20) is not None
        # What the attention mask is too short for counts as padding, as in `sdpa_mask`.
        assert streaming_mask(2, 1, 60, q_offset=59, attention_mask=nothing[:, :50]) is not None

    def test_a_mask_of_a_million_tokens_takes_no_memory(self):
        mask = streaming_mask(1, 4096, 1 << 20, q_offset=(1 << 20) - 4096)
        assert mask.shape == (1, 1, 4096, 1 << 20)
        assert mask.rule.visible(slice(0, 4096), slice(0, 1 << 19)) is True
        assert mask.rule.visible(slice(0, 16), slice((1 << 20) - 16, 1 << 20)) is False
        assert "whole" not in vars(mask.rule)
