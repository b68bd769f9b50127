"""Runs both example scripts in each flag style, in one process and in two; the table of the page on apex.

``python -m tests.example_styles`` runs the cells that ``benchmarks/results/example_styles.json`` lacks, each in
processes of its own, and writes the table between two marks of the page. ``--only PATTERN`` chooses cells.

Two processes have half of the batch each. O0 is the yardstick of how far two processes are from one without mixed
precision: batch norms have statistics of half a batch, and dropout draws other numbers in each process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "example_styles.json"
PAGE = RESULTS.with_suffix(".md")
MARKS = "<!-- from benchmarks/results/example_styles.json by tests/example_styles.py -->", "<!-- end of it -->"
# The script's own main, and what it trained. One level each.
MAIN = """
import json, os, sys, {0}
(t,) = {0}.main(sys.argv[1:])
found = {{"losses": t.losses, "accuracy": t.accuracy, "scale": t.scale()}}
open(f"{1}/trained{{os.environ.get('RANK', '0')}}.json", "w").write(json.dumps(found))
"""
COUNTS = ("1", "2")
Found = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A script with its flags; ``small`` makes it short, with ``{batch}`` for the images of each process."""

    script: str
    words: str
    small: str
    batch: int = 0  # of all processes

    @property
    def name(self) -> str:
        """The command, as the table has it."""
        norm = "" if "bert" in self.script or "group" in self.small else ", batch norm"
        return f"`{self.script}.py` `{self.words}`{norm}"

    def arguments(self, processes: int) -> list[str]:
        """Return the command line of each process."""
        return [*self.small.format(batch=self.batch // processes).split(), *self.words.split()]


BATCH_NORM = "--epochs 1 --steps 20 --print-freq 100 -b {batch}"
GROUP_NORM = f"--norm group {BATCH_NORM}"
FP16 = GROUP_NORM.replace("--steps 20", "--steps 4")  # convolutions in fp16 are slow on a CPU
BERT = (
    "--num_train_epochs 1 --max_steps 20 --hidden_size 64 --num_hidden_layers 1 --max_seq_length 32 --vocab_size 1000"
)


def cells() -> Iterator[Cell]:
    """Yield all cells, in the order of the table."""
    for words in (
        *(f"--opt-level {level} --dynamic-loss-scale" for level in ("O0", "O1", "O2", "O3")),
        "--opt-level O1 --static-loss-scale 128.0",
        "--opt-level O2 --static-loss-scale 128.0",
        *(f"--opt-level {level} --channels-last" for level in ("O0", "O1", "O3")),
        "--opt-level O2 --channels-last --cudnn-benchmark",
    ):
        yield Cell("imagenet", words, GROUP_NORM, 16)
    for words in (
        "--opt-level O0",
        "--opt-level O1 --dynamic-loss-scale",
        "--opt-level O2 --static-loss-scale 128.0",
        "--opt-level O2 --keep-batchnorm-fp32 True --channels-last",
        "--opt-level O3 --keep-batchnorm-fp32 True",
        "--opt-level O3 --keep-batchnorm-fp32 False",
    ):
        yield Cell("imagenet", words, BATCH_NORM, 16)
    yield Cell("imagenet", "--opt-level O0 --static-loss-scale 128.0", FP16, 8)
    for words in (
        "--opt-level O1 --static-loss-scale 128.0",
        "--opt-level O1 --dynamic-loss-scale",
        "--opt-level O2 --dynamic-loss-scale",
    ):
        yield Cell("imagenet", f"--dtype fp16 {words}", FP16, 8)
    for words in (
        *(f"--opt_level {level}" for level in ("O0", "O1", "O2", "O3")),
        "--fp16 --loss_scale 0",
        "--fp16 --loss_scale 128",
        "--fp16 --loss_scale 0 --opt_level O1",
        "--fp16 --loss_scale 128 --opt_level O1",
        *(f"--gradient_accumulation_steps 2 {more}" for more in ("--opt_level O0", "--opt_level O1")),
        "--gradient_accumulation_steps 2 --fp16 --loss_scale 0 --opt_level O1",
        "--gradient_accumulation_steps 2 --fp16 --loss_scale 0",
    ):
        yield Cell("bert_classifier", words, BERT)
    for words in ("--opt_level O0", "--opt_level O1", "--fp16 --loss_scale 0"):
        yield Cell("bert_classifier", f"--dropout 0 {words}", BERT)


def trained(cell: Cell, processes: int) -> dict[str, Any]:
    """Run one cell; return losses, accuracy and loss scale, the same in all processes."""
    with tempfile.TemporaryDirectory() as folder:
        main = Path(folder, "main.py")
        main.write_text(MAIN.format(cell.script, folder))
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        words = [sys.executable, *(launch if processes > 1 else ()), str(main), *cell.arguments(processes)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "examples"), "OMP_NUM_THREADS": "1"}
        found = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
        if found.returncode:
            return {"failed": found.stderr.strip().splitlines()[-1][:200] if found.stderr else str(found.returncode)}
        ranks = [json.loads(Path(folder, f"trained{rank}.json").read_text()) for rank in range(processes)]
    assert all(rank == ranks[0] for rank in ranks), "all processes have the same losses, accuracy and scale"
    return ranks[0]


def table(found: dict[str, Found]) -> str:
    """Return the table of the cells that were run."""
    head = ("script and options", "last loss, 1 process", "2 processes", "largest difference in any step", "loss scale")
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---|"]
    for cell in cells():
        if cell.name in found:
            lines.append(f"| {cell.name} | {' | '.join(_row(found[cell.name]))} |")
    return "\n".join(lines)


def _row(ran: Found) -> Iterator[str]:
    for count in COUNTS:
        one = ran.get(count, {"failed": "not run"})
        yield one.get("failed") or f"{one['losses'][-1]:.4f}"
    losses = [ran[count]["losses"] for count in COUNTS if "losses" in ran.get(count, {})]
    yield f"{max(abs(a - b) for a, b in zip(*losses, strict=True)):.4f}" if len(losses) == 2 else ""
    yield "; ".join(dict.fromkeys(one["scale"] for one in ran.values() if "scale" in one))


def with_table(page: str, found: dict[str, Found]) -> str:
    """Return ``page`` with the table between the two marks."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{table(found)}\n\n{MARKS[1]}{after}"


def main() -> None:
    """Run what is missing, and write the file and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a pattern that is searched in the commands")
    asked = parser.parse_args()
    found: dict[str, Found] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for cell in cells():
        for count in COUNTS:
            ran = found.setdefault(cell.name, {})
            if re.search(asked.only, cell.name) and count not in ran:
                ran[count] = trained(cell, int(count))
                print(count, cell.name, {k: v for k, v in ran[count].items() if k != "losses"}, flush=True)
                kept = {name: ways for name, ways in found.items() if ways}
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
                PAGE.write_text(with_table(PAGE.read_text(), kept))


if __name__ == "__main__":
    main()
