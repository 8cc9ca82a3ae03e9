"""What a cache makes of the keys and values of one layer: how many stay exact, how wrong the others are, their size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from nvme_cache.arguments import cache_argument
from nvme_cache.bench.measure import Figures

from .contenders import Contender, one_layer, stored_bytes


@dataclass(frozen=True, slots=True)
class Seen:
    """What an update returned.

    Attributes:
        past: Tokens held before it.
        keys: `[1, num_key_value_heads, seq_length, head_dim]`.
        values: Likewise.
        nbytes: What the cache stores after it.
    """

    past: int
    keys: torch.Tensor
    values: torch.Tensor
    nbytes: int


@torch.no_grad()
def states_of(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the layer in the middle, for `ids`, `[1, length]`."""
    cache = DynamicCache(config=model.config)
    model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
    layer = cast(DynamicLayer, cache.layers[len(cache.layers) // 2])
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys, layer.values


def examine(
    contender: Contender, config: PreTrainedConfig, keys: torch.Tensor, values: torch.Tensor, folder: Path
) -> Figures:
    """Stores keys and values, `[1, num_key_value_heads, seq_length, head_dim]`, as they come while decoding.

    Returns:
        Figures, as JSON. `exact_tokens` is how many of the tokens that one token attends to are exact, on average over
        the second half; `..._as_fed` the same in the pieces in which this benchmark feeds text. Relative errors are the
        root mean square of the differences over that of the states, of the first tokens to be quantized, when
        that has just happened and at the end. `quantized_bits_per_element` is what longer contexts add.
    """
    length, step, lead = keys.shape[2], contender.step, contender.lead
    oldest = slice(lead, lead + step)
    errors: list[tuple[float, float]] = []
    sizes: dict[int, int] = {}
    counts: list[torch.Tensor] = []
    pieces = contender.chunks(length)
    for seen in _feed(contender, config, keys, values, pieces, folder):
        counts.append(_exact_tokens(seen, keys, values))
        errors.append((_error(seen.keys, keys, oldest), _error(seen.values, values, oldest)))
        sizes[seen.keys.shape[2]] = seen.nbytes
    in_first_half = sum(end <= length // 2 for end in accumulate(pieces))
    prompt = pieces[: max(1, in_first_half)]
    one_by_one = prompt + [1] * (length - sum(prompt))
    stepwise = [
        _exact_tokens(seen, keys, values) for seen in _feed(contender, config, keys, values, one_by_one, folder)
    ]
    # From one moment of the cycle to the same one later.
    first, last = lead + step, lead + (length - lead) // step * step
    elements = (last - first) * (keys[:, :, 0].numel() + values[:, :, 0].numel())
    once, at_end = errors[1], errors[-1]
    return {
        "exact_tokens": _late_mean(stepwise),
        "exact_tokens_as_fed": _late_mean(counts),
        "quantized_bits_per_element": 8 * (sizes[last] - sizes[first]) / elements,
        "key_error_once": once[0],
        "key_error_at_end": at_end[0],
        "value_error_once": once[1],
        "value_error_at_end": at_end[1],
    }


def _feed(
    contender: Contender,
    config: PreTrainedConfig,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunks: Sequence[int],
    folder: Path,
) -> Iterator[Seen]:
    with contender.open(one_layer(config), folder) as cache:
        past = 0
        for piece in zip(keys.split(list(chunks), dim=2), values.split(list(chunks), dim=2), strict=True):
            own_keys, own_values = cache.update(*(part.clone() for part in piece), 0)
            yield Seen(past, own_keys, own_values, stored_bytes(cache))
            past += piece[0].shape[2]


def _exact_tokens(seen: Seen, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """For each new token how many of those it attends to, itself among them, are exact."""
    length = seen.keys.shape[2]
    same = (seen.keys == keys[:, :, :length]) & (seen.values == values[:, :, :length])
    return same.all(dim=3).all(dim=1)[0].cumsum(dim=0)[seen.past :]


def _late_mean(counts: Sequence[torch.Tensor]) -> float:
    """The mean of the second half: the first tokens attend to few."""
    joined = torch.cat(list(counts))
    return float(joined[len(joined) // 2 :].double().mean())


def _error(seen: torch.Tensor, states: torch.Tensor, tokens: slice) -> float:
    exact = states[:, :, tokens].double()
    return float((seen[:, :, tokens].double() - exact).norm() / exact.norm())
