"""One document, a few questions, asked once with the cache in memory and once with it on NVMe.

Each run has a process of its own, so that its peak memory is its own: `python -m nvme_cache.demo REQUEST.json` answers
the request and leaves its results beside it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from .arguments import cache_argument
from .cache import OffloadedNVMeCache

_CHUNK = 1024
_SPLIT = "\N{SYMBOL FOR RECORD SEPARATOR}"


@dataclass(frozen=True, slots=True)
class Request:
    """What to ask, of which model, with which cache.

    Attributes:
        title: Shown beside the progress bar.
        model: Folder or hub name.
        document: The text to read.
        questions: What to ask about it, each on its own.
        max_new_tokens: Longest answer in tokens.
        on_nvme: Whether every sealed block goes to NVMe; else the cache is a `DynamicCache`.
        offload_dir: Folder for shards, None for the default.
    """

    title: str
    model: str
    document: str
    questions: list[str]
    max_new_tokens: int
    on_nvme: bool
    offload_dir: str | None


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of a request: the text, the evidence, and what it took.

    Attributes:
        texts: One answer a question.
        tokens: The answers' token ids.
        logits: `[tokens, vocabulary]`, one row for each token of all answers.
        prompt_tokens: Tokens of the document's prompt.
        prefill_s: Seconds to process them.
        answer_s: Seconds to process the questions and generate the answers.
        host_peak_bytes: Most host memory used beyond the loaded model.
        device_peak_bytes: Most accelerator memory used beyond the loaded model, 0 without one.
        usage: Bytes of the cache by tier.
        shards: Shard files that stock safetensors opened.
    """

    texts: list[str]
    tokens: list[int]
    logits: torch.Tensor
    prompt_tokens: int
    prefill_s: float
    answer_s: float
    host_peak_bytes: int
    device_peak_bytes: int
    usage: dict[str, int]
    shards: int


def ask(request: Request, folder: Path) -> Answers:
    """Answers `request` in a process of its own, with `folder` for what passes between the two.

    Raises:
        subprocess.CalledProcessError: the process failed; it has said why.
    """
    path = folder / f"{'nvme' if request.on_nvme else 'memory'}.json"
    path.write_text(json.dumps(asdict(request)))
    subprocess.run([sys.executable, "-m", "nvme_cache.demo", str(path)], check=True)
    results: dict[str, Any] = json.loads(path.read_text())
    return Answers(**results, logits=load_file(path.with_suffix(".safetensors"))["logits"])


def _answer(request: Request) -> Answers:
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(request.model, dtype="auto", device_map={"": device})
    message = {"role": "user", "content": f"{request.document}\n\nAnswer from the document above. {_SPLIT}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, after = str(text).split(_SPLIT)

    def encode(part: str) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids
        return ids.to(model.device)

    document_ids = encode(before)
    cache = (
        OffloadedNVMeCache(config=model.config, offload_dir=request.offload_dir, device_budget=0, host_budget=0)
        if request.on_nvme
        else DynamicCache(config=model.config)
    )
    texts: list[str] = []
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    with _peak_memory(model.device) as peak:
        began = time.perf_counter()
        _prefill(model, cache, document_ids, request.title)
        prefill_s = time.perf_counter() - began
        for question in tqdm(request.questions, desc=f"{request.title}: asking ", unit="question"):
            prompt = torch.cat([document_ids, encode(question + after)], dim=1)
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **{cache_argument(model): cache},
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            answer = output.sequences[0, prompt.shape[1] :]
            texts.append(str(tokenizer.decode(answer, skip_special_tokens=True)).strip())
            tokens += answer.tolist()
            logits += [step[0].cpu() for step in output.logits]
            # Back to the document alone: the next question is about it, not about the last answer.
            cache.crop(document_ids.shape[1] - cache.get_seq_length())
        answer_s = time.perf_counter() - began - prefill_s
    usage, shards = {"memory": _dynamic_bytes(cache)}, 0
    if isinstance(cache, OffloadedNVMeCache):
        usage, shards = cache.memory_usage(), _count_shards(cache.offload_path)
        cache.close()
    return Answers(
        texts=texts,
        tokens=tokens,
        logits=torch.stack(logits),
        prompt_tokens=document_ids.shape[1],
        prefill_s=prefill_s,
        answer_s=answer_s,
        host_peak_bytes=peak["host"],
        device_peak_bytes=peak["device"],
        usage=usage,
        shards=shards,
    )


@torch.no_grad()
def _prefill(model: PreTrainedModel, cache: DynamicCache, ids: torch.Tensor, title: str) -> None:
    with tqdm(total=ids.shape[1], desc=f"{title}: reading", unit="token") as progress:
        for chunk in ids.split(_CHUNK, dim=1):
            model(input_ids=chunk, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
            progress.update(chunk.shape[1])


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Yields what will hold, at the end, the peak of host and device memory beyond what was in use at the start."""
    peak = {"host": 0, "device": 0}
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the present
    host_before = _status_bytes("VmRSS")
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    device_before = 0
    if accelerator is not None:
        accelerator.reset_peak_memory_stats(device)
        device_before = accelerator.memory_allocated(device)
    yield peak
    peak["host"] = _status_bytes("VmHWM") - host_before
    if accelerator is not None:
        peak["device"] = accelerator.max_memory_allocated(device) - device_before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _dynamic_bytes(cache: DynamicCache) -> int:
    return sum(tensor.nbytes for keys, values, *_ in cache for tensor in (keys, values) if tensor is not None)


def _count_shards(folder: Path) -> int:
    """How many shards in `folder` stock safetensors opens and finds keys and values in: all of them, or it raises."""
    paths = list(folder.glob("*.safetensors"))
    for path in paths:
        with safe_open(path, framework="pt") as shard:
            shard.get_slice("keys"), shard.get_slice("values")
    return len(paths)


def _main() -> None:
    path = Path(sys.argv[1])
    answers = _answer(Request(**json.loads(path.read_text())))
    save_file({"logits": answers.logits}, path.with_suffix(".safetensors"))
    results = {name: value for name, value in asdict(answers).items() if name != "logits"}
    path.write_text(json.dumps(results))


if __name__ == "__main__":
    _main()
