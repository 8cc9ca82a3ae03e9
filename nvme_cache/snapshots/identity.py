"""Whose keys and values a snapshot holds, and why another model may not go on from them."""

import math
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import transformers
import xxhash
from transformers import PreTrainedConfig

from nvme_cache.errors import ConfigurationError, SnapshotMismatchError

from .manifest import ModelIdentity

if TYPE_CHECKING:  # importing it would start the compiler
    from transformers import PreTrainedModel

# Of a config, what says nothing of keys and values, or is compared by itself.
_UNRELATED = {
    "_attn_implementation_internal", "_commit_hash", "_experts_implementation_internal", "_name_or_path",
    "architectures", "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_KEEP_STATE_THEMSELVES = {"recurrent_gemma"}  # in the model's modules, where a cache cannot see it
_SAMPLES = 64  # numbers of each tensor of weights


def identify(config: PreTrainedConfig, model: "PreTrainedModel | None") -> ModelIdentity:
    """What to compare.

    Args:
        config: The model's config.
        model: The model itself; its weights are told apart by samples of every parameter.

    Raises:
        ConfigurationError: the model keeps part of its state outside the cache.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type in _KEEP_STATE_THEMSELVES:
        raise ConfigurationError(
            f"a {config.model_type} model keeps part of its state in itself, not in its cache: no snapshot could "
            "restore it"
        )
    dtype = config.dtype if model is None else model.dtype
    return ModelIdentity(
        model_type=config.model_type,
        architectures=list(config.architectures or []),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        config=_related(config.to_dict()),
        transformers=transformers.__version__,
        weights=None if model is None else digest_of(model),
    )


def check_identity(held: ModelIdentity, own: ModelIdentity, where: object) -> None:
    """Compares a snapshot's model with the one that is to go on from it.

    What one of the two does not know (dtype, weights, architectures) is not held against them.

    Raises:
        SnapshotMismatchError: they differ; the message says in what.
    """
    differences = [
        f"{name} is {theirs!r} there and {ours!r} here"
        for name, theirs, ours in (
            ("model_type", held.model_type, own.model_type),
            ("architectures", held.architectures or own.architectures, own.architectures or held.architectures),
            ("dtype", held.dtype or own.dtype, own.dtype or held.dtype),
            ("transformers", release_of(held.transformers), release_of(own.transformers)),
            *_pairs("config", held.config, own.config),
            ("weights", held.weights or own.weights, own.weights or held.weights),
        )
        if theirs != ours
    ]
    if differences:
        raise SnapshotMismatchError(
            f"the snapshot {where} is of another model: {'; '.join(differences)}. Its keys and values would give wrong "
            "text here: use the model it was made with, or prefill again."
        )


@torch.no_grad()
def digest_of(model: "PreTrainedModel") -> str:
    """A digest of names, shapes, dtypes and some numbers of all weights, and of which adapters are in use.

    It tells fine-tunes apart at little cost.
    """
    digest = xxhash.xxh3_128()
    samples: list[torch.Tensor] = []
    for name, parameter in sorted([*model.named_parameters(), *_kept_buffers(model)], key=itemgetter(0)):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        numbers = parameter.detach().reshape(-1)
        samples.append(numbers[:: max(1, numbers.shape[0] // _SAMPLES)].float())
    for name, module in model.named_modules():
        if isinstance(disabled := getattr(module, "disable_adapters", None), bool):  # one of PEFT's
            used = getattr(module, "active_adapters", None), getattr(module, "scaling", None)
            digest.update(f"{name} {disabled} {used}\n".encode())
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(sample)
    for parts in by_device.values():
        if parts[0].device.type != "meta":  # offloaded: nothing to look at
            digest.update(torch.cat(parts).cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_of(model: "PreTrainedModel") -> str:
    """As `digest_of`, within a process: tells small changes apart, too, and positions that images have shifted."""
    versions = [0 if each.is_inference() else each._version for each in model.parameters()]
    return f"{digest_of(model)} {hash(tuple(versions))} {shifted_by_images(model)}"


def shifted_by_images(model: "PreTrainedModel") -> list[Any]:
    """By how much models that keep this in themselves, as Qwen-VL do, shift positions since their last prompt."""
    deltas = [getattr(module, "rope_deltas", None) for module in model.modules()]
    return [each.tolist() for each in deltas if isinstance(each, torch.Tensor) and bool(each.any())]


def length_limit(config: PreTrainedConfig) -> float:
    """The longest sequences among which a token's keys are the same; some RoPEs stretch with the sequence."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    limits = [
        each.get("original_max_position_embeddings") or config.get_text_config(decoder=True).max_position_embeddings
        for each in (rope, *rope.values())
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=math.inf)


def _kept_buffers(model: "PreTrainedModel") -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that are saved with a model: quantized weights, among others."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _related(values: dict[str, Any]) -> dict[str, Any]:
    """Of a config's fields those that matter, as JSON gives them back."""
    return {str(key): _plain(value) for key, value in sorted(values.items()) if key not in _UNRELATED}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _related(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _pairs(name: str, theirs: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return [(name, theirs, ours)]
    keys = sorted({*theirs, *ours})
    return [pair for key in keys for pair in _pairs(f"{name}.{key}", theirs.get(key), ours.get(key))]


def release_of(version: str) -> str:
    """The series a version belongs to: those of one series compute alike."""
    return ".".join(version.split(".")[:2])
