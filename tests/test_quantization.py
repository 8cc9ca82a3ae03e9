"""Quantized blocks: what comes back is quanto's own quantize -> dequantize of each block, bit for bit.

That decoding with them equals decoding with a fake-quantized `DynamicCache` is for the tests of the contract; here are
the shapes and numbers that models seldom have, and what is on the drive.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import DynamicCache

import nvme_cache
from nvme_cache import ConfigurationError, OffloadedNVMeCache, QuantizationConfig
from nvme_cache.quantization import FORMATS, Quantized, warn_of_exact

from .conftest import MIXED, exact_int8_and_mixed, generate, prompt, stock_for, tiny_model, tokens
from .fake_quantized import FakeQuantizedCache, fake_quantized

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 63, 64, 65, 72, 80, 96, 128])
KINDS = st.sampled_from(FORMATS), st.sampled_from(["channel", "token"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
CONFIGS = {name: QuantizationConfig(key=name, value=name) for name in FORMATS} | {
    "mixed": MIXED,
    "axes exchanged": QuantizationConfig(key="int2", value="int8", axis_key="token", axis_value="channel"),
    "keys exact": QuantizationConfig(key=None, value="float8", sink_tokens=0),
}
every_config = pytest.mark.parametrize("quantization", CONFIGS.values(), ids=CONFIGS)
every_format = pytest.mark.parametrize("quantization", FORMATS)


def stored(codec, blocks):
    """What `codec` makes of blocks."""
    parts = [torch.empty(part.shape, dtype=part.dtype) for part in codec.parts(blocks.shape, blocks.dtype)]
    codec.encode(blocks, parts)
    return parts


def same(ours, theirs):
    return torch.equal(ours.nan_to_num(12345), theirs.nan_to_num(12345))


@settings(deadline=None, max_examples=200)
@given(*KINDS, DTYPES, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 5]), SIZES, SIZES, st.data())
def test_every_block_is_what_quanto_makes_of_it(name, axis, dtype, count, batch, heads, block_size, head_dim, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    blocks = torch.randn(count, batch, heads, block_size, head_dim, generator=generator)
    blocks[..., 0] *= 20  # a channel that stands out
    blocks = blocks.to(dtype)
    group_size = data.draw(st.sampled_from([16, 32, 64]))
    codec = Quantized(name, axis, group_size, block_size)
    states = torch.full(blocks.shape, torch.nan, dtype=dtype)
    codec.decode(stored(codec, blocks), states)
    for block, ours in zip(blocks, states, strict=True):
        if name in ("int4", "int2") and codec.parts((1, *block.shape), dtype)[1].nbytes == dtype.itemsize:
            continue  # a block of a single group: quanto takes its numbers one by one and divides by 0
        assert same(ours, fake_quantized(block, name, axis, group_size))


class Twins:
    """Ours and the reference, of one layer, given the same; what comes back, and what is held, must be the same."""

    def __init__(self, cache):
        self.ours, self.stock = cache, stock_for(cache)

    @torch.no_grad()
    def update(self, keys, values):
        assert all(map(torch.equal, self.ours.update(keys, values, 0), self.stock.update(keys, values, 0)))

    def random(self, *shape, dtype=torch.bfloat16):
        self.update(*torch.randn(2, *shape).to(dtype))

    def check(self):
        ours, stock = self.ours.layers[0], self.stock.layers[0]
        assert ours.get_seq_length() == stock.get_seq_length()
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)


@every_config
@pytest.mark.parametrize("block_size", [16, 7, 64])
@pytest.mark.parametrize("head_dim", [8, 72, 80, 96])
def test_widths_that_no_group_divides_and_prompts_of_any_length(head_dim, block_size, make_cache):
    for batch_size, length in [(1, 1), (2, 3), (5, 7), (1, 65), (2, 64), (5, 65)]:
        twins = Twins(make_cache(block_size=block_size))
        for count in (length, *[1] * 4, 65, 3, 1):
            twins.random(batch_size, 3, count, head_dim)
        twins.check()
        twins.ours.close()


@every_config
def test_latent_attention(make_cache):
    """One head, wide keys, values of another width; and keys that are the values."""
    twins, aliased = Twins(make_cache(block_size=16)), Twins(make_cache(block_size=16))
    for count in (65, 1, 20, 1, 1):
        latent = torch.randn(2, 1, count, 576).to(torch.bfloat16)
        twins.update(latent, latent[..., :512])
        aliased.update(latent, latent)
    twins.check()
    aliased.check()


@every_config
def test_keys_and_values_of_different_dtypes(make_cache):
    twins = Twins(make_cache(block_size=16))
    for count in (65, 1, 20, 1, 1):
        keys, values = torch.randn(2, 1, 2, count, 16)
        twins.update(keys, values.half())
    twins.check()


@every_config
@pytest.mark.parametrize("first", [40, 7])  # sealed already when the dtype changes, and not
def test_a_layer_that_goes_on_in_a_wider_dtype(first, make_cache):
    twins = Twins(make_cache(block_size=16))
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for count in (first, 3, 10, 20, 1):
            twins.random(2, 2, count, 16, dtype=dtype)
        twins.check()
    assert twins.ours.layers[0].keys.dtype == torch.float32


@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_zeros_stay_zeros(dtype, make_cache):
    cache = make_cache(block_size=16)
    for count in (65, 1, 20, 1):
        states = torch.zeros(2, 2, 2, count, 16, dtype=dtype)
        for returned in cache.update(*states, 0):
            assert torch.equal(returned, torch.zeros_like(returned))
    assert cache.memory_usage()["nvme"]


@every_format
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_group_and_nothing_else(bad, quantization, make_cache):
    states = torch.randn(2, 2, 2, 3 * 128 + 4, 128)
    at = 1, 0, 4 + 128 + 70, 100  # row, head, token 70 of the second block, channel
    states[:, *at] = 0
    spoilt = states.clone()
    spoilt[:, *at] = bad
    # Groups of int4 and int2 are 64 numbers, here half a block's column and half a row.
    size = 64 if quantization in ("int4", "int2") else 128
    token, channel = 4 + 128 + 70 // size * size, 100 // size * size
    groups = torch.zeros(2, *states.shape[1:], dtype=torch.bool)
    groups[0, 1, 0, token : token + size, 100] = True
    groups[1, 1, 0, at[2], channel : channel + size] = True
    results = []
    for given_states in (states, spoilt):
        cache = make_cache(block_size=128)
        cache.update(*given_states, 0)
        results.append(torch.stack([cache.layers[0].keys, cache.layers[0].values]))
    clean, ours = results
    assert ours[groups].isnan().all()
    assert torch.equal(ours[~groups], clean[~groups])


def checksums(cache):
    cache._pager.flush()
    return {path: xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in cache.offload_path.glob("*.safetensors")}


def turn(length, rows):
    """More tokens, passed with a mask over all."""

    def run(model, cache):
        mask = torch.ones(rows, cache.get_seq_length() + length, dtype=torch.long)
        tokens(model, prompt(length, rows) + 1, cache, attention_mask=mask)

    return run


def beams(model, cache):
    tokens(model, prompt(cache.get_seq_length() + 3, 2), cache, num_beams=3)


STEPS = {
    "a prompt": lambda model, cache: tokens(model, prompt(70, 2), cache),
    "a crop into a block": lambda model, cache: cache.crop(63 - cache.get_seq_length()),
    "another turn": turn(40, rows=2),
    "a crop": lambda model, cache: cache.crop(-3),
    "copies of the rows": lambda model, cache: cache.batch_repeat_interleave(3),
    "beams": beams,
    "rows in another order": lambda model, cache: cache.reorder_cache(torch.tensor([4, 0, 1, 5, 3, 2])),
    "a choice of rows": lambda model, cache: cache.batch_select_indices(torch.tensor([3, 1, 0])),
    "a turn of three rows": turn(20, rows=3),
    "a crop into the prompt": lambda model, cache: cache.crop(30 - cache.get_seq_length()),
}


@exact_int8_and_mixed
def test_nothing_that_is_done_to_a_cache_changes_a_byte_of_its_shards(make_cache):
    model = tiny_model()
    cache = make_cache(config=model.config, block_size=16)
    stock = stock_for(cache, model.config)
    seen = {}
    for name, step in STEPS.items():
        step(model, cache)
        step(model, stock)
        present = checksums(cache)
        assert all(present.get(path, checksum) == checksum for path, checksum in seen.items()), name
        if name == "a prompt":
            first = present
        seen |= present
        for ours, expected in zip(cache.layers, stock.layers, strict=True):
            assert torch.equal(ours.keys, expected.keys) and torch.equal(ours.values, expected.values), name
    assert len(seen) > 5 * len(model.model.layers)
    assert any(path in present for path in first)


def read_with_safetensors(path, name):
    """Keys or values of a shard, `[batch, heads, tokens, head_dim]`: what `Quantized` says, in a few lines."""
    with safe_open(path, "pt") as file:
        codec = json.loads(file.metadata()[f"{name}_codec"])
        codes, scale = file.get_tensor(name), file.get_tensor(f"{name}_scale")
        shift = file.get_tensor(f"{name}_shift") if f"{name}_shift" in file.keys() else None  # noqa: SIM118
    if codec["format"] in ("int4", "int2"):
        bits, span = int(codec["format"][3:]), codec["block_size"] // codes.shape[3]
        codes = torch.cat([codes >> at & (1 << bits) - 1 for at in range(0, 8, bits)], dim=4)[:, :, :, :, :span]
        codes = codes.flatten(3, 4)
    # Every number's own scale, and shift, beside it.
    dim = 3 if codec["axis"] == "channel" else 4
    scale, shift = (
        part if part is None else part.repeat_interleave(codes.shape[dim] // part.shape[dim], dim)
        for part in (scale, shift)
    )
    blocks = codes.to(scale.dtype) * scale
    if shift is not None:
        blocks = blocks - shift
    return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)


@every_format
@pytest.mark.parametrize(("block_size", "head_dim"), [(256, 128), (16, 24), (7, 80)])
def test_stock_safetensors_and_the_documentation_read_a_shard(quantization, block_size, head_dim, make_cache):
    for axes in (("channel", "token"), ("token", "channel")):
        config = QuantizationConfig(quantization, quantization, axis_key=axes[0], axis_value=axes[1])
        cache = make_cache(block_size=block_size, quantization=config)
        cache.update(*torch.randn(2, 2, 3, 4 + 3 * block_size, head_dim).to(torch.bfloat16), 0)
        [path] = checksums(cache)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert (metadata["layer_idx"], metadata["first_token"]) == ("0", "4")
        for name in ("keys", "values"):
            assert torch.equal(read_with_safetensors(path, name), getattr(cache.layers[0], name)[:, :, 4:])


@exact_int8_and_mixed
def test_a_copy_shares_the_shards_and_goes_on_by_itself(make_cache):
    twins = Twins(make_cache(block_size=16))
    for count in (70, 1, 20):
        twins.random(2, 2, count, 16)
    other = copy.deepcopy(twins)
    written = checksums(twins.ours)
    assert other.ours.offload_path == twins.ours.offload_path
    assert other.ours._pager.meter.written_bytes == 0
    for _ in range(3):
        for either in (twins, other):
            either.random(2, 2, 20, 16)
            either.random(2, 2, 1, 16)
    other.ours.crop(-40)
    other.stock.crop(-40)
    twins.check()
    assert written.items() <= checksums(twins.ours).items()
    twins.ours.close()
    other.random(2, 2, 30, 16)
    other.check()
    other.ours.close()


WITHOUT_A_COMPILER = """
import os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ninja":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
os.environ["PATH"] = "/nonexistent"

import torch
from torch.utils import cpp_extension

def refuse(*args, **kwargs):
    raise AssertionError("something wants a compiler")

cpp_extension.load = cpp_extension.load_inline = refuse

from nvme_cache import OffloadedNVMeCache
from nvme_cache.quantization import FORMATS
from tests.conftest import generate, tiny_model

results = {}
for name in FORMATS:
    model = tiny_model(dtype=torch.bfloat16)
    with OffloadedNVMeCache(
        config=model.config, offload_dir=sys.argv[1], host_budget=0, block_size=16, quantization=name
    ) as cache:
        results[name] = vars(generate(model, cache, 60))
torch.save(results, sys.argv[2])
try:
    torch.ops.quanto.unpack(torch.zeros(4, dtype=torch.uint8), 4)
except AssertionError:
    print("a compiler would have been noticed")
"""


def test_no_compiler_is_needed(offload_dir, tmp_path):
    results = tmp_path / "results.pt"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER, str(offload_dir), str(results)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"PYTHONPATH": str(Path(nvme_cache.__file__).parent.parent)},
    )
    assert run.returncode == 0, run.stderr
    assert "would have been noticed" in run.stdout
    model = tiny_model(dtype=torch.bfloat16)
    for name, ours in torch.load(results).items():
        stock = generate(model, FakeQuantizedCache(model.config, 16, name), 60)
        assert torch.equal(ours["tokens"], stock.tokens), name
        assert torch.equal(ours["logits"], stock.logits), name


def test_without_quanto_it_is_said_what_to_install(monkeypatch, make_cache):
    monkeypatch.setitem(sys.modules, "optimum", None)
    with pytest.raises(ConfigurationError, match=r"pip install optimum-quanto\) or pass quantization=None"):
        make_cache(quantization="int8")
    make_cache().update(*torch.randn(2, 1, 2, 300, 16), 0)


WRONG = {
    'key=\'int3\' must be one of None, "int8", "int4", "int2", "float8"': lambda: QuantizationConfig(key="int3"),
    'value=8 must be one of None, "int8", "int4", "int2", "float8"': lambda: QuantizationConfig(value=8),
    'axis_key=\'row\' must be one of "channel", "token"': lambda: QuantizationConfig(axis_key="row"),
    'axis_value=0 must be one of "channel", "token"': lambda: QuantizationConfig(axis_value=0),
    "q_group_size=0 must be a whole number of at least 1": lambda: QuantizationConfig(q_group_size=0),
    "q_group_size=64.0 must be a whole number of at least 1": lambda: QuantizationConfig(q_group_size=64.0),
    "sink_tokens=-1 must be a whole number of at least 0": lambda: QuantizationConfig(sink_tokens=-1),
    'quantization=\'int5\' must be one of None, "int8", "int4", "int2", "float8", or a QuantizationConfig': lambda: (
        OffloadedNVMeCache(quantization="int5")
    ),
    "quantization={'key': 'int8'} must be one of None": lambda: OffloadedNVMeCache(quantization={"key": "int8"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named_with_the_choices(message):
    with pytest.raises(ConfigurationError) as raised:
        WRONG[message]()
    assert message in str(raised.value)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.13), ("float8", 8.13), ("int4", 4.5), ("int2", 2.5)])
@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_bytes_a_token(tier, quantization, bits, make_cache):
    cache = make_cache(host_budget=(1 << 30) if tier == "host" else 0)
    sinks, sealed = 4, 4 * 256
    cache.update(*torch.randn(2, 2, 2, sinks + sealed, 128).to(torch.bfloat16), 0)
    shards = list(checksums(cache))
    numbers = 2 * 2 * 2 * 128  # keys and values, rows, heads, width; of a token
    usage = cache.memory_usage()
    assert usage.pop(tier) * 8 == pytest.approx(bits * numbers * sealed, rel=0.01)
    assert usage.pop("device") == sinks * numbers * 2
    assert set(usage.values()) == {0}
    in_files = 0
    for path in shards:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not name.endswith("_padding")]  # noqa: SIM118
            in_files += sum(file.get_tensor(name).nbytes for name in names)
    assert in_files == cache.memory_usage()["nvme"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_more_sinks_than_there_will_ever_be_tokens(mode, make_cache):
    cache = make_cache(block_size=16, quantization=QuantizationConfig(sink_tokens=1 << 40))
    stock = DynamicCache()
    for count in (40, 1, 15, 1, 200, 1):
        states = torch.randn(2, 2, 2, count, 16)
        with mode():
            assert all(map(torch.equal, cache.update(*states, 0), stock.update(*states, 0)))
    cache.crop(-120)
    stock.crop(-120)
    states = torch.randn(2, 2, 2, 60, 16)
    assert all(map(torch.equal, cache.update(*states, 0), stock.update(*states, 0)))
    assert checksums(cache) == {}


@pytest.mark.parametrize("sink_tokens", [4, 500])
def test_behind_many_sinks_a_tail_takes_no_more_memory_than_behind_few(sink_tokens, make_cache):
    cache = make_cache(block_size=16, quantization=QuantizationConfig(sink_tokens=sink_tokens))
    for count in (300, 230, 1):
        cache.update(*torch.randn(2, 2, 2, count, 16), 0)
    keys, _ = cache.layers[0]._history.tail.states()
    assert keys.untyped_storage().nbytes() == 2 * 16 * 2 * 2 * 16 * 4  # two blocks of two rows and heads of 16 floats


def test_what_stays_exact_is_said_once(make_cache, caplog):
    warn_of_exact.cache_clear()
    config = tiny_model("gemma3").config
    for _ in range(2):
        make_cache(config=config, quantization="int8")
    for layer_idx in range(2):
        cache = make_cache(block_size=16, quantization="int8")
        states = torch.randn(2, 1, 2, 40, 16)
        cache.update(*states.to(torch.float8_e4m3fn), layer_idx)
        assert torch.equal(cache.layers[layer_idx].keys.float(), states[0].to(torch.float8_e4m3fn).float())
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records if "quantization" in record.message]
    assert said == ["DynamicSlidingWindowLayer", "keys and values of torch.float8_e4m3fn"]


def test_layers_of_full_attention_alone_need_no_word(make_cache, caplog):
    warn_of_exact.cache_clear()
    cache = make_cache(config=tiny_model().config, block_size=16, quantization="int8")
    cache.update(*torch.randn(2, 1, 2, 40, 16), 0)
    assert not [record for record in caplog.records if "quantization" in record.getMessage()]
