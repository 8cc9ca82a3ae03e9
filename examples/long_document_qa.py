"""Ask questions about a long document with the KV cache on disk. Copy it and make it yours.

    python examples/long_document_qa.py MODEL document.txt "First question?" "Second question?"

The document is processed once. After each answer the cache is cropped back to it, so every question costs only its own
tokens; with shards on NVMe neither GPU nor host memory has to hold the document's keys and values.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nvme_cache import OffloadedNVMeCache


def main(model_name: str, document: str, questions: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto")

    message = {"role": "user", "content": f"{document}\n\nAnswer from the document above. <QUESTION>"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, after = text.split("<QUESTION>")

    def encode(part: str) -> torch.Tensor:
        return tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)

    document_ids = encode(before)
    with OffloadedNVMeCache(config=model.config) as cache:
        for question in questions:
            prompt = torch.cat([document_ids, encode(question + after)], dim=1)
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,  # or cache=cache, as transformers 5.24 and later prefer
                max_new_tokens=100,
                do_sample=False,
            )
            print(f"{question}\n  {tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()}")
            cache.crop(document_ids.shape[1] - cache.get_seq_length())
        print({tier: f"{nbytes / 2**20:.1f} MiB" for tier, nbytes in cache.memory_usage().items()})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3:])
