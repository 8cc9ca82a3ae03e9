"""Whether a model still finds a fact planted in a long document."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from nvme_cache.arguments import cache_argument
from nvme_cache.bench.measure import Figures

from .contenders import Contender, branch, close
from .text import Text

_SPLIT = "\N{SYMBOL FOR RECORD SEPARATOR}"


class Fact(NamedTuple):
    """A sentence, a question about it, and what the answer must contain."""

    sentence: str
    question: str
    answer: str


FACTS = (
    Fact("The access code of the north gate is 7214.", "What is the access code of the north gate?", "7214"),
    Fact(
        "The telephone number of the harbour office is 5093.",
        "What is the telephone number of the harbour office?",
        "5093",
    ),
    Fact(
        "The bell of Saint Olaf weighs 845 kilograms.",
        "How many kilograms does the bell of Saint Olaf weigh?",
        "845",
    ),
    Fact("The secret ingredient of the soup is saffron.", "What is the secret ingredient of the soup?", "saffron"),
    Fact("The serial number of the red tractor is 66120.", "What is the serial number of the red tractor?", "66120"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A document with facts planted in it, ready to be asked about.

    Attributes:
        ids: The prompt up to the question, `[1, length]`.
        facts: Each with its depth, the share of the document before it.
        end: What follows a question in the prompt.
    """

    ids: torch.Tensor
    facts: list[tuple[float, Fact]]
    end: str


def document(tokenizer: Any, text: Text, length: int, count: int, number: int) -> Document:
    """The `number`th document of about `length` tokens, with `count` facts at depths of 10 to 90 %.

    Each document has other paragraphs, and the facts at other depths.
    """
    paragraphs = text.paragraphs()
    first = number * len(paragraphs) // 8 % len(paragraphs)
    chosen: list[str] = []
    tokens = 0
    for paragraph in paragraphs[first:] + paragraphs[:first]:
        tokens += _encoded(tokenizer, paragraph).shape[1]
        if tokens > length:
            break
        chosen.append(paragraph)
    turn = number % len(FACTS)
    facts = [((index + 0.5) / count, fact) for index, fact in enumerate((FACTS[turn:] + FACTS[:turn])[:count])]
    planted = list(chosen)
    for depth, fact in reversed(facts):
        planted.insert(round(depth * len(chosen)), fact.sentence)
    content = "\n\n".join([*planted, f"Answer from the document above. {_SPLIT}"])
    message = {"role": "user", "content": content}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, end = str(prompt).split(_SPLIT)
    return Document(_encoded(tokenizer, before), facts, end)


@torch.no_grad()
def ask(
    model: PreTrainedModel, tokenizer: Any, contender: Contender, asked: Document, longest: int, folder: Path
) -> list[Figures]:
    """Reads the document as if it were decoded, then answers each question about it, greedily.

    Returns:
        For each fact its depth, the answer, and whether it was found.
    """
    results = []
    with contender.open(model.config, folder) as cache:
        for piece in asked.ids.split(contender.chunks(asked.ids.shape[1]), dim=1):
            _next_token(model, cache, piece)
        for depth, fact in asked.facts:
            own = branch(cache)
            answer = _answer(model, tokenizer, own, _encoded(tokenizer, fact.question + asked.end), longest)
            close(own)
            results.append({"depth": depth, "answer": answer, "found": fact.answer in answer})
    return results


def summary(results: Sequence[Figures]) -> Figures:
    """How many were found: of all, and by depth."""
    depths = sorted({result["depth"] for result in results})
    return {
        "asked": len(results),
        "found": sum(result["found"] for result in results),
        "found_by_depth": {
            f"{depth:.0%}": sum(result["found"] for result in results if result["depth"] == depth) for depth in depths
        },
        "answers": list(results),
    }


def _answer(model: PreTrainedModel, tokenizer: Any, cache: Cache, ids: torch.Tensor, longest: int) -> str:
    answer: list[int] = []
    while len(answer) < longest:
        ids = _next_token(model, cache, ids)
        if ids.item() == tokenizer.eos_token_id:
            break
        answer.append(int(ids.item()))
    return str(tokenizer.decode(answer, skip_special_tokens=True)).strip()


def _next_token(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
    token: torch.Tensor = output.logits[:, -1].argmax(dim=-1, keepdim=True)
    return token


def _encoded(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids
