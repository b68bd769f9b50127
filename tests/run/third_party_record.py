"""The record of ``third_party``: what each script printed, in each way and from each seed; and its table.

``Record(Path("scripts.json"))`` reads what is there and runs nothing twice; ``table()`` is the page beside it.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

HEAD = """\
# Published scripts under `amp-graph run`

`python -m tests.run.third_party --record benchmarks/results/scripts.json` runs training scripts that others published,
unmodified, on small inputs, on a CPU with torch {torch} and Python {python}: in fp32, with forward and loss under
bf16 autocast, and by `amp-graph run` in bf16 and in fp16. All of a row have the same seed. The distance of two runs is
the mean difference of the losses that they print, relative to the mean loss. Losses are the last ones printed.
Three runs in fp32 from three seeds are the yardstick of what a script's own chance does: the last column is the
largest distance between them. An empty cell was not run.
"""
NOTES = """\
siamese_network ends in a sigmoid, and its loss is BCELoss. bf16 rounds a probability to 1 from a logit of about 6 on,
and BCELoss then gives 100 for an example of the other class: so autocast's distance. amp_graph computes that sigmoid in
fp32.
word_language_model updates its parameters without an optimizer, so that no step with infinite gradients could be
skipped: in fp16 it stays as written. dcgan (ignite) prints averages over 100 iterations with batches of 2 images.
"""
WAYS = ("fp32", "autocast", "amp-graph bf16", "amp-graph fp16")


class Record:
    """All runs, in the file ``path`` if there is one, by script, seed and way.

    Each is a dict: ``status``, the ``losses`` it printed, ``told``, the report of amp-graph or the end of the errors,
    and ``seconds``. ``machine``: the versions that they were made with.
    """

    def __init__(self, path: Path | None) -> None:
        held = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.path, self.machine, self.runs = path, held.get("machine", {}), held.get("runs", {})

    def ran(self, name: str, seed: int, way: str, run: Callable[[], dict]) -> dict:
        """Return the run that is there, or run and write the file, and the page beside it."""
        ways = self.runs.setdefault(name, {}).setdefault(str(seed), {})
        if way not in ways:
            ways[way] = run()
            self.machine = {"torch": torch.__version__, "python": platform.python_version()}
            if self.path is not None:
                self.path.write_text(json.dumps({"machine": self.machine, "runs": self.runs}, indent=1) + "\n")
                self.path.with_suffix(".md").write_text(table(self))
        return ways[way]


def distance(one: list[float], other: list[float]) -> float:
    """Return the mean distance of two runs' losses, relative to the size of the losses."""
    if len(one) != len(other) or not one:
        return float("nan")
    return float(np.abs(np.subtract(one, other)).mean() / max(np.abs(one).mean(), 1e-9))


def table(record: Record) -> str:
    """Return the page: a row for each script and seed, and what amp-graph reported from the first seed."""
    columns = ["script", "seed", "losses", *(f"{way}: last" for way in WAYS), *(f"{way}: distance" for way in WAYS[1:])]
    lines = [HEAD.format(**record.machine), _row([*columns, "between seeds"]), "|---|" + "---:|" * len(columns)]
    for name, seeds in record.runs.items():
        plain = [ways["fp32"]["losses"] for ways in seeds.values() if "fp32" in ways]
        apart = max((distance(a, b) for i, a in enumerate(plain) for b in plain[:i]), default=math.nan)
        for seed, ways in seeds.items():
            lines.append(_row([name, seed, *_cells(ways), _number(apart)]))
    lines += ["", NOTES, "What `amp-graph run` reported at exit, from the first seed:", ""]
    for name, seeds in record.runs.items():
        ways = next(iter(seeds.values()))
        lines += [f"- {name}, {way}: {ways[way]['told']}" for way in WAYS[2:] if way in ways]
    return "\n".join(lines) + "\n"


def _cells(ways: dict[str, dict]) -> list[str]:
    plain = ways["fp32"]["losses"] if "fp32" in ways else []
    far = [_number(distance(plain, ways[way]["losses"])) if way in ways else "" for way in WAYS[1:]]
    return [str(len(plain)), *(_last(ways[way]) if way in ways else "" for way in WAYS), *far]


def _last(one: dict) -> str:
    return f"{one['losses'][-1]:.4f}" if one["losses"] and not one["status"] else f"exit status {one['status']}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
