"""What a cache is said to hold, from the config alone, is what real caches of real models hold."""

import json
import time

import pytest
import torch
from transformers import (
    AutoConfig,
    BartConfig,
    CpmAntConfig,
    DeepseekV3Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    LongcatFlashConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
)

from nvme_cache.arguments import cache_argument
from nvme_cache.errors import ConfigurationError
from nvme_cache.footprint import footprint_of, read_config
from nvme_cache.layers import NVMeLayer
from nvme_cache.quantization import FORMATS, QuantizationConfig, parse_quantization

from .test_architectures import VARIANTS, tiny

ROWS, TOKENS, BLOCK = 2, 64, 16
# With the variant of sizes that suits them: full attention; sliding; latent; linear; shared keys and values; an index
# beside; attention and convolution by turns.
FAMILIES = {
    "llama": 0, "qwen3": 0, "gemma3_text": 0, "gpt_oss": 0, "deepseek_v3": 1, "qwen3_next": 0, "mistral": 0,
    "gemma3n_text": 0, "deepseek_v32": 1, "lfm2": 0, "recurrent_gemma": 0, "bamba": 3, "jetmoe": 0,
}  # fmt: skip

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, dtype="bfloat16",
)  # fmt: skip


def real_bytes(layer):
    """Of a layer of a real cache, all rows."""
    if isinstance(layer, NVMeLayer):
        return sum(layer.used_bytes().values()) + layer.tail_bytes()
    states = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    for held in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        states += held.values()
    return sum(tensor.nbytes for tensor in states if tensor is not None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_bytes_are_those_really_stored(family, make_cache):
    model = tiny(family, VARIANTS[FAMILIES[family]])
    footprint = footprint_of(model.config, torch.float32)
    cache = make_cache(config=model.config, block_size=BLOCK)
    ids = torch.randint(2, 120, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(input_ids=ids, **{cache_argument(model): cache}, use_cache=True)

    usage = cache.memory_usage()
    assert usage == {"device": 0, "host": 0, "nvme": ROWS * TOKENS * footprint.paged_token_bytes}
    assert [layer.is_paged for layer in footprint.layers] == [isinstance(layer, NVMeLayer) for layer in cache.layers]
    assert [ROWS * layer.nbytes(TOKENS) for layer in footprint.layers] == list(map(real_bytes, cache.layers))
    resident = sum(real_bytes(layer) for layer in cache.layers if not isinstance(layer, NVMeLayer))
    assert footprint.resident_bytes(TOKENS, ROWS) == resident
    assert footprint.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "jetmoe", "deepseek_v3", "qwen3_next", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_quantized_bytes_are_those_really_stored(family, make_cache):
    model = tiny(family, VARIANTS[FAMILIES[family]])
    footprint, block_size = footprint_of(model.config, torch.float32), 256
    ids = torch.randint(2, 120, (ROWS, block_size), generator=torch.Generator().manual_seed(1))
    for name in FORMATS:
        quantization = QuantizationConfig(key=name, value=name, sink_tokens=0)
        cache = make_cache(config=model.config, quantization=quantization)
        with torch.no_grad():
            model(input_ids=ids, **{cache_argument(model): cache}, use_cache=True)
        stored = footprint.stored_token_bytes(quantization)
        assert cache.memory_usage() == {"device": 0, "host": 0, "nvme": ROWS * block_size * stored}
        assert stored < footprint.paged_token_bytes / 2


def test_full_size_llama():
    footprint = footprint_of(LLAMA_8B)
    assert footprint.paged_token_bytes == 131_072
    bits = {None: 16, "int8": (8 + 16 / 256 + 8 + 16 / 128) / 2, "int4": 4.5, "int2": 2.5}
    for name, expected in bits.items():
        assert footprint.stored_token_bytes(parse_quantization(name)) * 8 == 65_536 * expected
    assert footprint.weight_bytes == footprint.step_weight_bytes(8) == 2 * 8_030_261_248
    assert footprint_of(LLAMA_8B, torch.float32).paged_token_bytes == 262_144
    assert footprint.resident_bytes(1 << 20) == 0


def test_the_config_is_left_as_it_was():
    config = LlamaConfig(num_hidden_layers=1, dtype="float16", attn_implementation="sdpa")
    footprint_of(config, torch.float32)
    assert (config.dtype, config._attn_implementation) == (torch.float16, "sdpa")


def test_full_size_deepseek_v3_caches_what_is_latent():
    began = time.perf_counter()
    footprint = footprint_of(DeepseekV3Config())
    assert time.perf_counter() - began < 8
    assert {(layer.spec.keys.nbytes(1), layer.spec.values.nbytes(1)) for layer in footprint.paged} == {(1024, 128)}
    assert footprint.paged_token_bytes == 61 * 576 * 2
    assert footprint.weight_bytes // 2 // 10**9 == 671
    # 8 of 256 experts a token: 37 billion parameters take part.
    assert footprint.step_weight_bytes() // 2 // 10**9 == 37
    assert footprint.step_weight_bytes(1000) == footprint.weight_bytes


def test_full_size_models_that_page_some_layers():
    gpt_oss = footprint_of(GptOssConfig())
    assert len(gpt_oss.paged) == 18
    assert gpt_oss.paged_token_bytes == 18 * 2 * 8 * 64 * 2
    assert gpt_oss.resident_bytes(100_000) == 18 * 127 * 2 * 8 * 64 * 2
    hybrid = footprint_of(Qwen3NextConfig())
    assert hybrid.paged_token_bytes == 12 * 2 * 2 * 256 * 2
    convolution, recurrent = 4 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128
    assert hybrid.resident_bytes(1) == hybrid.resident_bytes(100_000) == 36 * (2 * convolution + 4 * recurrent)


def test_of_a_composite_config_the_text_counts():
    config = Gemma3Config()
    assert footprint_of(config) == footprint_of(config.get_text_config(decoder=True))


def test_models_without_a_footprint_are_refused():
    with pytest.raises(ConfigurationError, match=r"LongcatFlashConfig holds.*memory_usage"):
        footprint_of(LongcatFlashConfig())
    with pytest.raises(ConfigurationError, match="an encoder with a decoder"):
        footprint_of(BartConfig())
    with pytest.raises(ConfigurationError, match="nothing to page"):
        footprint_of(OpenAIGPTConfig())
    with pytest.raises(ConfigurationError, match="DynamicLayer of this model grows"):  # a prefix before each prompt
        footprint_of(CpmAntConfig())


def test_configs_are_read_from_folders(tmp_path):
    AutoConfig.for_model("llama", hidden_size=96).save_pretrained(tmp_path)
    assert read_config(tmp_path).hidden_size == 96
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(ConfigurationError, match="unheard-of"):
        read_config(tmp_path)
    for missing in (tmp_path / "none", "nobody/nothing-at-all"):
        with pytest.raises(ConfigurationError, match=r"Pass a folder with a config\.json"):
            read_config(missing)
