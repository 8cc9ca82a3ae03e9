"""Takes out every wait, event and keep-alive of the package in turn; the tests must go red for each.

python -m tests.adversarial.mutants
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One line of the package without its synchronisation.

    Attributes:
        hazard: What the line keeps from happening.
        module: Where it is.
        line: The text to replace; found there once.
        without: What to put in its place.
    """

    hazard: str
    module: str
    line: str
    without: str


MUTANTS = [
    Mutant(
        "tokens are sealed before the model has computed them",
        "seal",
        "transfer.side_stream(transfer.mark())",
        "transfer.side_stream(lane.packed)",
    ),
    Mutant(
        "a slot is refilled while attention still reads it",
        "pager",
        "after = lane.transfer.mark()",
        "after = lane.packed",
    ),
    Mutant(
        "attention reads a slot before it is filled",
        "pager",
        "lane.transfer.wait(part.event)",
        "pass",
    ),
    Mutant(
        "attention reads blocks where they are kept before they are there",
        "pager",
        "lane.transfer.wait(lane.packed)",
        "pass",
    ),
    Mutant(
        "attention waits for too early a point (blocks read)",
        "fetch",
        "self._filled(self.transfer.record())\n\n    def copy(",
        "self._filled(after)\n\n    def copy(",
    ),
    Mutant(
        "attention waits for too early a point (resident blocks)",
        "fetch",
        "self._filled(self.transfer.record())\n\n    def _read(",
        "self._filled(after)\n\n    def _read(",
    ),
    Mutant(
        "a copy into a slot comes before its last reader is done",
        "fetch",
        "self.transfer.side_stream(after):",
        "self.transfer.side_stream(self.transfer.record()):",
    ),
    Mutant(
        "a staging buffer is filled again while the device copies from it",
        "buffers",
        "        event.synchronize()  # the device may still be copying from these bytes\n",
        "",
    ),
    Mutant(
        "a staging buffer comes back before its copy has passed",
        "fetch",
        "staging.release(buffer, self.transfer.record())",
        "staging.release(buffer, after)",
    ),
    Mutant("a shard is written before its bytes have arrived", "spill", "    write.event.synchronize()\n", ""),
    Mutant(
        "what is being sealed to the drive is freed",
        "seal",
        "buffers, states, self._pack(",
        "buffers, [], self._pack(",
    ),
    Mutant(
        "what is being sealed to memory is freed",
        "seal",
        "            self.writer.hold(event, states, (keys, values))",
        "            pass",
    ),
    Mutant(
        "what is held is let go before its copy",
        "spill",
        "    event.synchronize()\n\n\ndef _explained",
        "    pass\n\n\ndef _explained",
    ),
    Mutant(
        "a slot's memory is given back while copies into it are queued",
        "slots",
        "            self._transfer.record().synchronize()\n",
        "",
    ),
    Mutant(
        "a slot is laid out anew while threads still fill it",
        "slots",
        "            wait(self.tasks)\n            self",
        "            self",
    ),
    Mutant(
        "a closed cache gives memory back while copies use it",
        "pager",
        "            lane.transfer.record().synchronize()",
        "            pass",
    ),
    Mutant("a replayed graph overwrites what is being sealed", "seal", "        transfer.wait(lane.packed)\n", ""),
    Mutant(
        "the next seal waits for too early a point",
        "seal",
        "        lane.packed = transfer.record()\n        return lane.packed",
        "        lane.packed, event = transfer.mark(), transfer.record()\n        return event",
    ),
    Mutant("a slot is laid out in memory of another stream", "slots", " or self.stream != self._transfer.stream()", ""),
    Mutant("a slot is used on another stream than its own", "slots", " and self.stream == self._transfer.stream()", ""),
    Mutant(
        "a shard is read before it is written",
        "fetch",
        "            read.shard.written.result()\n",
        "            pass\n",
    ),
    Mutant(
        "a slot is refilled while someone holds its tensors",
        "slots",
        "if slot is not keep and not slot.is_shared()]\n        idle",
        "if slot is not keep]\n        idle",
    ),
    Mutant(
        "a slot is refilled while it is the one in use",
        "slots",
        "for slot in self._slots if slot is not keep and not slot.is_shared()]\n        idle",
        "for slot in self._slots if not slot.is_shared()]\n        idle",
    ),
    Mutant(
        "the tail is written to while it is being sealed",
        "layers",
        "        rest = self._new_tail(cut(pending, due, tail.length + count - due))\n",
        "        parts, rest = cut(pending, due, tail.length + count - due), tail\n"
        "        parts = [(keys.clone(), values.clone()) for keys, values in parts]\n"
        "        tail.length = 0\n"
        "        [tail.append(part) for part in parts]\n",
    ),
]

SYNCHRONISATION = re.compile(
    r"\.synchronize\(|transfer\.wait\(|\.mark\(\)|(?<!packed=transfer)\.record\(\)|\.side_stream\(|\.hold\("
)


def uncovered() -> list[str]:
    """Lines of the package that synchronise and that no mutant takes out."""
    lines = []
    for path in sorted((ROOT / "nvme_cache").glob("*.py")):
        # The interface and its mapping to torch; a measurement, whose waits order nothing.
        if path.name in ("transfer.py", "machine.py"):
            continue
        text = path.read_text()
        spans = [
            (start := text.index(mutant.line), start + len(mutant.line))
            for mutant in MUTANTS
            if mutant.module == path.stem
        ]
        for found in SYNCHRONISATION.finditer(text):
            if not any(start <= found.start() < end for start, end in spans):
                lines.append(f"{path.name}: {text[: found.start()].count(chr(10)) + 1}")
    return lines


def is_killed(mutant: Mutant) -> bool:
    """Whether the tests notice."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nvme_cache", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        module = Path(folder, "nvme_cache", f"{mutant.module}.py")
        text = module.read_text()
        assert text.count(mutant.line) == 1, (
            f"{mutant.module}.py has this {text.count(mutant.line)} times: {mutant.line}"
        )
        module.write_text(text.replace(mutant.line, mutant.without))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--timeout=60",
            "-p",
            "no:cacheprovider",
            "tests/adversarial/test_hazards.py",
        ]
        status = subprocess.run(command, cwd=folder, env={"PYTHONPATH": folder}, capture_output=True).returncode
        assert status in (0, 1), f"the tests did not run: pytest ended with {status}"
        return status == 1


def main() -> int:
    survivors = []
    for mutant in MUTANTS:
        killed = is_killed(mutant)
        print("killed  " if killed else "SURVIVES", mutant.hazard, flush=True)
        survivors += [] if killed else [mutant]
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} killed")
    return 1 if survivors or uncovered() else 0


if __name__ == "__main__":
    sys.exit(main())
