"""The tables of README.md, of docs/internals and of results/speed.md, from the files of results.

    python benchmarks/page_tables.py            # writes them
    python benchmarks/page_tables.py --check    # only says whether they are what the results give

README.md has a row for each machine, docs/internals/speed.md a table for each, docs/internals/memory.md one of the
peak of memory. They stand between markers, and have the medians of the first run in their file of results in which the
heap was the same on all sides.
``results/speed.md`` and ``results/peak_memory.md`` have everything.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peak_tables
from tables import SAME, about, baseline, columns, comparable, markdown, mean, options_text, ratio, title

ROOT = Path(__file__).parent.parent
Results = dict[str, Any]
DOCS = ROOT / "docs"
README, WIDE, MEMORY = ROOT / "README.md", DOCS / "internals" / "speed.md", DOCS / "internals" / "memory.md"
RESULTS = ROOT / "benchmarks" / "results"
NARROW = {"training": ["amp_graph", "TrainStep", "TrainStep cuda_graph"], "inference": ["amp_graph"]}
HEADS = ["training: `convert`", "`TrainStep`", "`TrainStep`, `cuda_graph=True`", "inference"]


def verdict(*machines: Results) -> str:
    """Return a row for each machine: the geometric mean of each way over the models, and its range."""
    lines = [f"| machine | {' | '.join(HEADS)} |", "|---|" + "---:|" * len(HEADS)]
    for held in machines:
        results = comparable(held)[0]["results"]
        cells = [_range(results.get(mode, {}), name) for mode, names in NARROW.items() for name in names]
        lines.append(f"| {_hardware(held['machine'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _hardware(machine: Results) -> str:
    kind = (
        "matrix units (AMX)" if machine["amx"] else "AVX-512 bf16" if machine["avx512_bf16"] else "no bf16 arithmetic"
    )
    name = machine.get("gpu") or f"{machine['processor']}, {kind}"
    return f"{name}; torch {machine['torch']}"


def _range(results: Results, name: str) -> str:
    ratios = [float(r) for entry in results.values() if (r := ratio(entry["variants"].get(name), SAME))]
    return f"**{mean(results, name, SAME)}** ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def narrow(held: Results) -> str:
    """Return one table of a device: a row a model, training to the left and inference to the right."""
    run = comparable(held)[0]
    shown = {m: [n for n in NARROW[m] if n in columns(found)] for m, found in run["results"].items()}
    heads = [h for mode, names in shown.items() for h in (f"{mode}: autocast, ms", *names)]
    models = list(dict.fromkeys(model for results in run["results"].values() for model in results))
    lines = [f"{about(held['machine'])} {title(run['options'])}.", ""]
    lines += [f"| model | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for model in models:
        cells = [c for mode, names in shown.items() for c in _cells(run["results"][mode].get(model), names)]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    means = [c for mode, names in shown.items() for c in ("", *(_mean(run["results"][mode], n) for n in names))]
    return "\n".join([*lines, f"| **geometric mean** | {' | '.join(means)} |"])


def wide(held: Results) -> str:
    """Return a table for each mode: a row a model, a column a variant."""
    run = comparable(held)[0]
    lines = [about(held["machine"]), f"Here: {title(run['options'])}.", "", options_text(run["options"])]
    for mode, results in run["results"].items():
        names = [n for n in columns(results) if n != "fp32" and "amp_graph.optim" not in n]  # optimizers that are gone
        lines += ["", f"| {mode} | autocast, ms | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
        lines += [f"| {model} | {' | '.join(_cells(entry, names))} |" for model, entry in results.items()]
        lines.append(f"| **geometric mean** | | {' | '.join(_mean(results, n) for n in names)} |")
    return "\n".join(lines)


def _cells(entry: Results | None, names: list[str]) -> list[str]:
    if entry is None:  # a model that was measured in the other mode alone
        return [""] * (1 + len(names))
    return [baseline(entry), *(ratio(entry["variants"].get(n), SAME) for n in names)]


def _mean(results: Results, name: str) -> str:
    return f"**{mean(results, name, SAME)}**"


# Each block: the page, its name in the markers, what writes it, and the files of results.
BLOCKS: list[tuple[Path, str, Callable[..., str], list[str]]] = [
    (README, "speed", verdict, ["speed.json", "zen5/speed.json", "zen4/speed.json", "h200/speed.json"]),
    (WIDE, "speed", wide, ["speed.json"]),
    (WIDE, "h200", narrow, ["h200/speed.json"]),
    (MEMORY, "peak", peak_tables.narrow, ["peak_memory.json"]),
]


def pages() -> dict[Path, str]:
    """Return the text that each page with such tables shall have."""
    texts = {page: page.read_text() for page, *_ in BLOCKS}
    for page, name, write, sources in BLOCKS:
        texts[page] = with_block(texts[page], name, write(*(json.loads((RESULTS / s).read_text()) for s in sources)))
    whole = {RESULTS / "speed.json": markdown, RESULTS / "peak_memory.json": peak_tables.markdown}
    return texts | {source.with_suffix(".md"): write(json.loads(source.read_text())) for source, write in whole.items()}


def markers(name: str) -> tuple[str, str]:
    """Return what stands before and behind a block."""
    return f"<!-- {name}: written by benchmarks/page_tables.py -->", f"<!-- end of {name} -->"


def with_block(text: str, name: str, block: str) -> str:
    """Return ``text`` with ``block`` between its markers; SystemExit where they are not there once each, in order."""
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"the page needs {begin} and behind it {end}, once each")
    return f"{text[: text.index(begin)]}{begin}\n{block}\n{text[text.index(end) :]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables, or with --check say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    for path, text in pages().items():
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.name} is not what the results give\n  fix:   python benchmarks/page_tables.py")


if __name__ == "__main__":
    main()
