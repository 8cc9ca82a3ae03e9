"""The tax of a token with prompt lookup and with an assistant, streaming: each sweep serves several tokens.

python -m benchmarks.lookup --model DIR
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import nvme_cache
from nvme_cache import OffloadedNVMeCache
from nvme_cache.arguments import cache_argument

_QUESTION = "Quote, word for word, what the document says about the powers of the President."


def main(
    model: Annotated[str, typer.Option(help="Folder of a model.")],
    document: Annotated[Path, typer.Option(help="Text.")] = Path("examples/us_constitution.txt"),
    folder: Annotated[Path | None, typer.Option(help="Where shards go.")] = None,
    characters: Annotated[int, typer.Option(help="Of the document to read, from its beginning.")] = 16_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 60,
) -> None:
    """Prints a table: tokens a sweep, tax and time a token, and whether the tokens are those of one token a sweep.

    Several tokens at once are rounded otherwise than one, with `DynamicCache` too: in bfloat16 they may differ.
    """
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    message = {"role": "user", "content": f"{document.read_text()[:characters]}\n\n{_QUESTION}"}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ways: dict[str, dict[str, Any]] = {
        "one token a sweep": {},
        "prompt lookup, 3 candidates": {"prompt_lookup_num_tokens": 3},
        "prompt lookup, 10 candidates": {"prompt_lookup_num_tokens": 10},
        "assisted by itself, 5 candidates": {"assistant_model": network, "num_assistant_tokens": 5},
    }
    table = Table("", "tokens a sweep", "tax, ms a token", "expected", "ms a token", "MB read a token", "tokens")
    answers: list[torch.Tensor] = []
    base_ms = 0.0
    with nvme_cache.enable(network, attention="streaming", offload_dir=folder):
        for name, options in ways.items():
            with OffloadedNVMeCache(config=network.config, offload_dir=folder, host_budget=0) as cache:
                answers.append(
                    network.generate(
                        **ids, **{cache_argument(network): cache}, max_new_tokens=new_tokens, do_sample=False, **options
                    )
                )
                report = cache.tax
            decode = report.decode
            accepted, tax_ms = decode.tokens / decode.steps, 1e3 * sum(decode.tax_s.values()) / decode.tokens
            base_ms = base_ms or tax_ms
            same = torch.equal(answers[-1], answers[0])
            table.add_row(
                name, f"{accepted:.2f}", f"{tax_ms:.1f}", f"{base_ms / accepted:.1f}",
                f"{1e3 * decode.wall_s / decode.tokens:.0f}", f"{decode.read_bytes / decode.tokens / 1e6:.0f}",
                "the same" if same else "different",
            )  # fmt: skip
    console.print(table)
    console.print(tokenizer.decode(answers[0][0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    typer.run(main)
