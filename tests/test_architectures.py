"""Every causal-LM family that transformers can build from a tiny random config: tokens and logits, exact and quantized.

A few families of each kind run always, all of them with `-m slow`.
"""

import contextlib
import functools
import io
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nvme_cache.arguments import cache_argument

from .conftest import exact_and_int8, stock_for

# Most configs take their sizes from some of these names; each config is given those it knows.
SIZES = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"], 96),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"], 4),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "top_k", "num_key_value_heads", "encoder_layers"], 2),
    **dict.fromkeys(["n_group", "topk_group", "bos_token_id", "mamba_n_groups"], 1),
    **dict.fromkeys(["head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], 16),
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 128),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 512),
    "encoder_attention_heads": 4, "q_lora_rank": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
    "sliding_window": 24, "pad_token_id": 0, "eos_token_id": None, "lora_rank": 8, "mamba_n_heads": 4,
    "mamba_d_head": 32, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# What some families need beside or instead; tried in order.
VARIANTS = [
    {},
    {"num_key_value_heads": 4, "head_dim": None, "rope_interleave": True},
    {"rotary_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4, "decoder_start_token_id": 1},
    {"num_hidden_layers": 8, "attn_layer_indices": [1, 3, 5, 7], "attn_layer_period": 2, "attn_layer_offset": 1,
     "hybrid_layer_ids": [1, 3], "full_attention_interval": 2, "layer_group_size": 2},
    {"num_hidden_layers": 6, "num_layers": 6},
    {"num_key_value_heads": None, "head_dim": None, "sliding_window": None, "q_lora_rank": None},
]  # fmt: skip

# One or two of each kind of layer: full, sliding, chunked, latent, shared, linear, hybrid, convolution, odd ones.
SOME = ["llama", "falcon", "gpt2", "gemma3_text", "gpt_oss", "cohere2", "llama4_text", "deepseek_v3", "gemma3n_text",
        "gemma4", "qwen3_next", "jamba", "bamba", "lfm2", "recurrent_gemma", "deepseek_v32",
        "hrm_text", "moshi", "bloom", "opt", "mixtral", "minimax_m2"]  # fmt: skip


def tiny(name, variant):
    """A tiny random model of the family, or None if the variant does not fit it."""
    config_class = type(AutoConfig.for_model(name))
    sizes = {key: value for key, value in (SIZES | variant).items() if value is not None or key == "eos_token_id"}
    known = config_class()
    given = {key: value for key, value in sizes.items() if hasattr(known, key) or key == "pad_token_id"}
    config = config_class(**given)
    decoder = config.get_text_config(decoder=True)
    if decoder is not config:
        for key, value in sizes.items():
            if hasattr(decoder, key):
                setattr(decoder, key, value)
    kinds = getattr(decoder, "layer_types", None)
    if kinds is not None and len(kinds) != decoder.num_hidden_layers:
        distinct = list(dict.fromkeys(kinds))
        decoder.layer_types = [distinct[i % len(distinct)] for i in range(decoder.num_hidden_layers)]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > 60e6:
        return None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def run(model, cache, **options):
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = torch.randint(2, 120, (rows, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if rows == 2:
        ids[1, :7], mask[1, :7] = 0, 0
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=40, do_sample=False, use_cache=True, disable_compile=True,
        return_dict_in_generate=True, output_logits=rows == 2, **{cache_argument(model): cache}, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits) if rows == 2 else torch.zeros(0)


MODES = {"greedy": {}, "beams": {"num_beams": 2}, "lookup": {"prompt_lookup_num_tokens": 3}}


@functools.lru_cache(maxsize=1)  # exact and quantized follow each other
def that_runs(name, mode):
    """The family's first variant that runs, and twice alike, with transformers' own cache."""
    for variant in VARIANTS:
        with contextlib.suppress(Exception):
            model = tiny(name, variant)
            if model is not None:
                config = model.config.get_text_config(decoder=True)
                first, second = (run(model, DynamicCache(config=config), **MODES[mode]) for _ in range(2))
                if all(map(torch.equal, first, second)):
                    return model
    return None


@exact_and_int8
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "family",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_family(family, mode, make_cache):
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        model = that_runs(family, mode)
        if model is None:
            return  # nothing to compare with: transformers' own cache does not run it, so small or in this mode
        config = model.config.get_text_config(decoder=True)
        cache = make_cache(config=config, block_size=16, prefetch_depth=0)
        ours, stock = (run(model, either, **MODES[mode]) for either in (cache, stock_for(cache, config)))
    assert all(map(torch.equal, ours, stock))


def test_most_of_the_families_that_always_run_do_run():
    """Guards against a change upstream that would turn the comparison above into nothing."""
    known = [name for name in SOME if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        ran = [name for name in known if that_runs(name, "greedy") is not None]
    assert len(ran) >= 0.9 * len(known), sorted(set(known) - set(ran))
