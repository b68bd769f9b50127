"""The table of the zoo, made of its file of results: a summary, what is not ok, what is above the bound, all rows."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.zoo.results import WORDS

HIGH = 1.5  # a ratio above has its cause in the table
CAUSES = Path(__file__).with_name("causes.json")  # {"timm/x bf16": "why"}, found by amp_graph.compare or by hand
Models = dict[str, dict[str, Any]]


def failing(found: dict[str, Any]) -> bool:
    """Say whether a model counts and a row of it is not ok."""
    counts = bool(found) and not found.get("unavailable") and not found.get("uncounted")
    return counts and not all(found.get(word, {}).get("ok") for word in WORDS)


def markdown(models: Models, total: int) -> str:
    """Return the page of the table; ``total``: how many models the zoo has."""
    causes = json.loads(CAUSES.read_text())
    lines = [
        "# The model zoo",
        "",
        *_about(),
        "",
        f"Measured: {len(models)} of the zoo's {total} models.",
        "",
        *_summary(models),
    ]
    lines += ["", "## Not ok", "", *_or_none(_not_ok(models, causes))]
    lines += ["", f"## An error above {HIGH} times autocast's", "", *_or_none(_above(models, causes))]
    lines += ["", "## Not counted", "", *_or_none(_uncounted(models)), "", "## All rows", "", *_rows(models)]
    return "\n".join(lines) + "\n"


def _about() -> list[str]:
    return [
        "Written by `make zoo` (`python -m tests.zoo`). Unmodified models of other packages, in tiny configurations",
        "with random weights, on a CPU. Each is converted, trained 3 steps, evaluated, deep-copied, saved and",
        'loaded, and trained with another size of the batch. It counts if `torch.compile(backend="eager")` trains it.',
        "`captured`: the share of a forward's operations that run inside of captured graphs. `error`: the error of",
        "outputs and gradients against fp32 over that of `torch.autocast`, root mean square over seeds (3, or 12 if",
        "3 gave more than 1.1), and behind it that of the outputs and that of the gradients.",
    ]


def _pairs(models: Models) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, found in models.items():
        if found and not found.get("unavailable") and not found.get("uncounted"):
            for word in WORDS:
                yield name, word, found.get(word, {"ok": False, "cause": "not run", "notes": []})


def _summary(models: Models) -> list[str]:
    lines = [
        "| precision | models | ok | share | median error | worst error | above 1.5 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for word in WORDS:
        rows = [row for _, w, row in _pairs(models) if w == word]
        good = [row for row in rows if row["ok"]]
        ratios = [row["ratio"] for row in good if math.isfinite(row["ratio"])] or [math.nan]
        share = len(good) / len(rows) if rows else 0.0
        high = sum(ratio > HIGH for ratio in ratios)
        lines.append(
            f"| {word} | {len(rows)} | {len(good)} | {share:.1%} | {statistics.median(ratios):.3f} "
            f"| {max(ratios):.2f} | {high} |"
        )
    return lines


def _not_ok(models: Models, causes: dict[str, str]) -> list[str]:
    found = [(n, w, row["cause"]) for n, w, row in _pairs(models) if not row["ok"]]
    return [f"- {n}, {w}: {_escaped(cause)}{_because(causes, n, w)}" for n, w, cause in found]


def _above(models: Models, causes: dict[str, str]) -> list[str]:
    high = [(row["ratio"], n, w) for n, w, row in _pairs(models) if row["ok"] and row["ratio"] > HIGH]
    return [f"- {n}, {w}: {ratio:.2f}{_because(causes, n, w)}" for ratio, n, w in sorted(high, reverse=True)]


def _because(causes: dict[str, str], name: str, word: str) -> str:
    cause = causes.get(f"{name} {word}") or causes.get(name)
    return f". {cause}" if cause else ""


def _uncounted(models: Models) -> list[str]:
    found = ((n, row.get("unavailable") or row.get("uncounted")) for n, row in models.items())
    return [f"- {name}: {_escaped(why)}" for name, why in found if why]


def _rows(models: Models) -> list[str]:
    heads = " | ".join(f"{word} captured | {word} error" for word in WORDS)
    lines = [f"| model | {heads} | notes |", "|---|---:|---|---:|---|---|"]
    for name, found in models.items():
        if found.get("unavailable") or found.get("uncounted"):
            continue
        rows = [found.get(word, {}) for word in WORDS]
        notes = dict.fromkeys(note for row in rows for note in row.get("notes", []))
        cells = " | ".join(_cells(row) for row in rows)
        lines.append(f"| {name} | {cells} | {_escaped('; '.join(notes))} |")
    return lines


def _cells(row: dict[str, Any]) -> str:
    if not row.get("ok"):
        return "| not ok"
    return f"{row['captured']:.0%} | {row['ratio']:.2f} ({row['output']:.2f}, {row['gradient']:.2f})"


def _or_none(lines: list[str]) -> list[str]:
    return lines or ["None."]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
