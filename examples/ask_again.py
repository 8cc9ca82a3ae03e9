"""Ask ten questions about a long document, each in a process of its own: only the first has to read it.

    python examples/ask_again.py MODEL document.txt STORE chart.png

Each process generates with `reuse`, so what the first computes is found by the others in the store of snapshots, a
folder on a fast drive. Prints every answer and the time to its first token, and draws the times
(pip install 'nvme-cache[bench]' for the chart).
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import nvme_cache

QUESTIONS = [
    "What are the two chambers of Congress?",
    "Who is the Commander in Chief of the Army and Navy?",
    "What does the Fourth Amendment protect against?",
    "How long is the term of a senator?",
    "Who elects the president?",
    "How old must a president be?",
    "What can Congress tax?",
    "Who judges impeachments?",
    "When does a law need two thirds?",
    "How is the constitution amended?",
]


class Clock(TextStreamer):
    """Notes when the first new token comes."""

    first_s = None

    def put(self, value) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
        elif self.first_s is None:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass


def answer(model_name: str, document: str, store: str, question: str) -> None:
    """One process: prints the answer and the seconds to its first token as JSON."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto", device_map="auto")
    message = {"role": "user", "content": f"{document}\n\nAnswer from the document above. {question}"}
    inputs = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    clock = Clock(tokenizer)
    with nvme_cache.enable(model, reuse=nvme_cache.SnapshotStore(store, size_limit="20GiB")):
        began_s = time.perf_counter()
        output = model.generate(**inputs, streamer=clock, max_new_tokens=30, do_sample=False)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(json.dumps({"answer": text.strip(), "first_token_s": clock.first_s - began_s}))


def main(model_name: str, document: str, store: str, chart: str) -> None:
    seconds = []
    for question in QUESTIONS:
        command = [sys.executable, __file__, model_name, document, store, chart, question]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        said = json.loads(run.stdout)
        seconds.append(said["first_token_s"])
        print(f"{seconds[-1]:7.2f} s  {question}\n           {said['answer']}")
    draw(seconds, chart)


def draw(seconds: list[float], chart: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(range(1, len(seconds) + 1), seconds, width=0.7)
    axes.bar_label(bars, [f"{each:.2g}" for each in seconds], fontsize=8)
    axes.set_xticks(range(1, len(seconds) + 1))
    axes.set_xlabel("process")
    axes.set_ylabel("seconds to the first token")
    figure.savefig(chart, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) > 5:
        answer(sys.argv[1], Path(sys.argv[2]).read_text(), sys.argv[3], sys.argv[5])
    else:
        main(*sys.argv[1:5])
