"""What is read: the prose of Python's own reference, which comes with every Python."""

import hashlib
import platform
import re
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch

from nvme_cache.errors import ConfigurationError

NAME = f"pydoc_data.topics of Python {platform.python_version()}, markup stripped"
_LEAST_PARAGRAPH = 200  # characters; less is headings and lists


@dataclass(frozen=True, slots=True)
class Text:
    """A text and its tokens.

    Attributes:
        prose: The text.
        ids: Its tokens, `[length]`, int64.
    """

    prose: str
    ids: torch.Tensor

    @classmethod
    def tokenized(cls, tokenizer: Any) -> "Text":
        """The reference, by alphabet of its topics."""
        prose = "\n\n".join(_paragraphs("\n\n".join(text for _, text in sorted(topics.topics.items()))))
        # Longer than any model's context, which is what a tokenizer would warn of.
        ids = tokenizer(prose, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
        return cls(prose, ids[0])

    def describe(self) -> dict[str, Any]:
        """Which text it was, for the record."""
        return {
            "name": NAME,
            "sha256": hashlib.sha256(self.prose.encode()).hexdigest(),
            "characters": len(self.prose),
            "tokens": self.ids.shape[0],
        }

    def windows(self, length: int, count: int) -> list[torch.Tensor]:
        """Windows of `length` tokens and the one behind them, `[1, length + 1]` each, evenly spaced over the text.

        Raises:
            ConfigurationError: the text has too few tokens for them not to overlap.
        """
        apart = self.ids.shape[0] // count
        if apart < length + 1:
            raise ConfigurationError(
                f"windows={count:,} of tokens={length:,} are more than the text's {self.ids.shape[0]:,}; ask for fewer"
            )
        return [self.ids[None, start : start + length + 1] for start in range(0, count * apart, apart)]

    def paragraphs(self) -> list[str]:
        """Its longer paragraphs."""
        return [each for each in self.prose.split("\n\n") if len(each) >= _LEAST_PARAGRAPH]


def _paragraphs(text: str) -> list[str]:
    without_rules = re.sub(r"^[*=~^\"-]{3,}$", "", text, flags=re.MULTILINE)
    without_emphasis = re.sub(r"\*([^*\s][^*\n]*)\*", r"\1", without_rules)
    return [" ".join(each.split()) for each in re.split(r"\n\s*\n", without_emphasis) if each.strip()]
