"""How well a model predicts a text with each cache, and how far from its predictions with an exact one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from nvme_cache.arguments import cache_argument
from nvme_cache.bench.measure import Figures

from .contenders import EXACT, Contender


@dataclass(frozen=True, slots=True)
class Scores:
    """Predictions of the tokens of a text, `[predictions]` each.

    Attributes:
        contexts: How many tokens each was made from, int64.
        nll: Negative log-likelihood of the text's token, in nats, fp32.
        exact_nll: The same with the exact cache.
        divergence: Kullback-Leibler divergence from the exact cache's distribution, in nats, fp32.
        agrees: Whether the likeliest token is the exact cache's, bool.
    """

    contexts: torch.Tensor
    nll: torch.Tensor
    exact_nll: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor

    @classmethod
    def joined(cls, parts: Iterable["Scores"]) -> "Scores":
        """All predictions of `parts`."""
        columns = zip(*((each.contexts, each.nll, each.exact_nll, each.divergence, each.agrees) for each in parts),
                      strict=True)  # fmt: skip
        return cls(*(torch.cat(column) for column in columns))

    def between(self, low: int, high: int) -> "Scores":
        """Those made from more than `low` tokens and at most `high`."""
        chosen = (self.contexts > low) & (self.contexts <= high)
        return Scores(
            self.contexts[chosen],
            self.nll[chosen],
            self.exact_nll[chosen],
            self.divergence[chosen],
            self.agrees[chosen],
        )

    def summary(self) -> Figures:
        """Means over all predictions, as JSON; the standard error takes them for independent of each other."""
        difference = (self.nll - self.exact_nll).double()
        ratio = math.exp(difference.mean())
        spread = difference.std().item() if len(difference) > 1 else 0.0
        return {
            "predictions": len(difference),
            "perplexity": math.exp(self.nll.double().mean()),
            "exact_perplexity": math.exp(self.exact_nll.double().mean()),
            "perplexity_change_percent": 100 * (ratio - 1),
            "perplexity_change_standard_error_percent": 100 * ratio * spread / math.sqrt(len(difference)),
            "kl_divergence_nats": self.divergence.double().mean().item(),
            "top1_agreement_percent": 100 * self.agrees.double().mean().item(),
        }


def score(log_q: torch.Tensor, log_p: torch.Tensor, targets: torch.Tensor, first_context: int) -> Scores:
    """Scores consecutive predictions.

    Args:
        log_q: Logarithms of probabilities, `[predictions, vocabulary]`, fp32.
        log_p: The exact cache's, likewise.
        targets: The text's tokens, `[predictions]`, int64.
        first_context: How many tokens the first prediction was made from.
    """
    contexts = torch.arange(first_context, first_context + len(targets))
    nll, exact_nll = (-each.gather(1, targets[:, None])[:, 0] for each in (log_q, log_p))
    divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    agrees = log_q.argmax(dim=-1) == log_p.argmax(dim=-1)
    return Scores(contexts, nll, exact_nll, divergence, agrees)


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    ids: torch.Tensor,
    chunks: Sequence[int],
    *,
    warm_up: int,
    folder: Path,
    look: Callable[[str, Cache], None] = lambda name, cache: None,
) -> dict[str, Scores]:
    """Feeds the same tokens to `contenders` and to an exact cache, all in the same pieces, in lockstep.

    In the same pieces, because products of other shapes round differently: with none but the exact cache's numbers
    every difference would be 0.

    Args:
        model: What predicts.
        contenders: The caches.
        ids: The text, `[1, sum(chunks) + 1]`.
        chunks: Tokens of each call.
        warm_up: Predictions from at most as many tokens are not scored.
        folder: Where caches may put files.
        look: Called with each contender's name and its cache in the end.

    Returns:
        The scores of each contender by name.
    """
    found: dict[str, list[Scores]] = {each.name: [] for each in contenders}
    with ExitStack() as stack:
        caches = {each.name: stack.enter_context(each.open(model.config, folder)) for each in contenders}
        stock = caches.get(EXACT, DynamicCache(config=model.config))
        start = 0
        for length in chunks:
            piece, targets = ids[:, start : start + length], ids[0, start + 1 : start + length + 1]
            is_scored = start + length > warm_up
            log_p = _log_probabilities(model, stock, piece, parts=1, all_of_them=is_scored)
            for each in contenders:
                log_q = log_p
                if each.name != EXACT:
                    log_q = _log_probabilities(model, caches[each.name], piece, parts=each.parts, all_of_them=is_scored)
                if is_scored:
                    found[each.name].append(score(log_q, log_p, targets, start + 1).between(warm_up, start + length))
            start += length
        for name, cache in caches.items():
            look(name, cache)
    return {name: Scores.joined(parts) for name, parts in found.items()}


def _log_probabilities(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, *, parts: int, all_of_them: bool
) -> torch.Tensor:
    """`[predictions, vocabulary]`, fp32: for each of `ids`, `[1, length]`, or only for the last."""
    found = []
    for piece in ids.split(-(-ids.shape[1] // parts), dim=1):
        kept = piece.shape[1] if all_of_them else 1
        output = model(piece, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=kept)
        found.append(torch.log_softmax(output.logits[0].float(), dim=-1))
    return torch.cat(found)


def buckets(low: int, high: int) -> list[tuple[int, int]]:
    """From `low` to `high`, each as long as all before it: such as 512 to 1,024, to 2,048, to 4,096."""
    edges = [low]
    while edges[-1] < high:
        edges.append(min(2 * edges[-1], high))
    return list(pairwise(edges))


def summaries(scores: Mapping[str, Scores], edges: Sequence[tuple[int, int]]) -> Figures:
    """Of each cache's predictions: all, and by the length of the context."""
    return {
        name: {
            "overall": found.summary(),
            "by_context": [
                {"above_tokens": low, "to_tokens": high} | found.between(low, high).summary() for low, high in edges
            ],
        }
        for name, found in scores.items()
    }
