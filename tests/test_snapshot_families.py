"""Every kind of layer survives its process: a family's cache, saved here, gives another process the same logits."""

import contextlib
import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nvme_cache import ConfigurationError, OffloadedNVMeCache
from nvme_cache.arguments import cache_argument

from .test_architectures import run, that_runs

FORMATS = {"exact": None, "int8": "int8"}
# Full attention, sliding, chunked, latent, shared, linear, hybrid, convolution, indexed, more layers than configured.
KINDS = ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "gemma4", "qwen3_next", "jamba", "lfm2", "deepseek_v32",
         "hrm_text"]  # fmt: skip


def one_more_token(model, cache, mask):
    with torch.no_grad():
        ids = torch.full((2, 1), 5)
        return model(ids, attention_mask=mask, use_cache=True, **{cache_argument(model): cache}).logits


def saved(family, folder):
    """Saves a filled cache in each format, with what one more token gives. Whether the family runs."""
    model = that_runs(family, "greedy")
    if model is None:
        return False
    for name, quantization in FORMATS.items():
        options = {"block_size": 16, "host_budget": 0, "quantization": quantization}
        with OffloadedNVMeCache(
            config=model.config.get_text_config(decoder=True), offload_dir=folder, **options
        ) as cache:
            sequences, _ = run(model, cache)
            mask = torch.ones(2, sequences.shape[1], dtype=torch.long)
            mask[1, :7] = 0
            cache.save_pretrained(folder / name, model=model, token_ids=sequences[:, :-1])
            torch.save((mask, one_more_token(model, cache, mask)), folder / f"{name}.logits")
    return True


def differing(root):
    """The families in `root` whose logits are others here, in another process."""
    found = []
    for folder in sorted(root.iterdir()):
        if (model := that_runs(folder.name, "greedy")) is None:
            continue
        for name in FORMATS:
            mask, expected = torch.load(folder / f"{name}.logits")
            with OffloadedNVMeCache.from_pretrained(folder / name, model=model, offload_dir=folder) as cache:
                if not torch.equal(one_more_token(model, cache, mask), expected):
                    found.append(f"{folder.name} {name}")
    return found


def compare(families, root):
    """How many families ran; raises if one differs in another process."""
    count = 0
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        for family in families:
            (root / family).mkdir()
            count += saved(family, root / family)
    check = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.test_snapshot_families", str(root)],
        capture_output=True, text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert check.returncode == 0, check.stdout + check.stderr[-700:]
    return count


def test_some_families_of_each_kind(tmp_path):
    known = [name for name in KINDS if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert compare(known, tmp_path) >= 0.9 * len(known)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_family(tmp_path):
    # They keep their state elsewhere than in the cache, or put tokens of their own beside those given: refused.
    refused = {"recurrent_gemma", "cpmant", "xlm", "rwkv"}
    assert compare([name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in refused], tmp_path) > 150


def test_a_model_with_state_of_its_own_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="a recurrent_gemma model keeps part of its state in itself"):
        saved("recurrent_gemma", tmp_path)


if __name__ == "__main__":
    if found := differing(Path(sys.argv[1])):
        sys.exit(f"differ: {found}")
