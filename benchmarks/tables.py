"""Markdown from the results of ``speed.py``: all that a file of results has, as in ``results/speed.md``.

``page_tables.py`` writes it, and the shorter tables of README.md and docs/internals/speed.md.
"""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

SAME, EAGER, COMPILED_AUTOCAST = "against_same_mode", "against_autocast", "against_compiled"
SAID = {  # in a title, where they are set
    "raised_thresholds": "malloc thresholds raised on all sides",
    "no_grad": "no grad",
    "cudnn_benchmark": "cudnn benchmark",
    "cuda_graphs": "cuda graphs",
}
COMPILED = "Inductor"
COSTS = """\
The second table of each mode has figures measured once: milliseconds, and their ratio to the estimated limit
(`limits.py`); casts, and the megabytes that they read and write; the megabytes saved for backward as activations and as
low-precision weight copies (their sum if a compiler hides the split), the peak above what is held between steps, and
what is held; seconds of the first call, and of amp_graph's passes in it; on a GPU the number of kernels, their
milliseconds, and these as a fraction of the step. Facts about operations are cached per process, so the passes of later
rows take less time. Empty: not measurable."""
LEFT_OUT = (
    "Left out, as amp_graph alone kept freed memory in them (`keep_memory=true`, which no longer exists): {} run(s)."
)
Results = dict[str, Any]


def one_line(mode: str, name: str, entry: Results) -> str:
    """Return what is printed once a model was measured."""
    rows = entry["variants"].items()
    return f"{mode} {name}: " + ", ".join(
        f"{n} {r['ms']:.1f} ms x{ratio(r, SAME)}" if "ms" in r else f"{n} {r['error']}" for n, r in rows
    )


def markdown(held: Results) -> str:
    """Return everything in a file of results as Markdown."""
    lines = ["# Speed against torch.autocast", "", about(held["machine"]), "", COSTS]
    shown = comparable(held)
    if len(shown) < len(held["runs"]):
        lines += ["", LEFT_OUT.format(len(held["runs"]) - len(shown))]
    for run in shown:
        if run["results"]:
            lines += ["", f"## {title(run['options'])}", "", options_text(run["options"], " [quartiles]")]
            lines += rates_text(run["results"])
        for mode, results in run["results"].items():
            lines += [*speed_table(mode, results), *cost_table(mode, results)]
    return "\n".join(lines) + "\n"


def comparable(held: Results) -> list[Results]:
    """Return the runs in which the heap was the same on all sides."""
    return [r for r in held["runs"] if not r["options"].get("keep_memory") or r["options"]["raised_thresholds"]]


def about(machine: Results) -> str:
    """Return the machine and the versions in one line."""
    if "gpu" in machine:
        return f"{machine['gpu']}, CUDA {machine['cuda']}; torch {machine['torch']}, Python {machine['python']}."
    return (
        f"{machine['processor']}, {machine['capability']}, bf16 dot products: {_yes(machine['avx512_bf16'])}, "
        f"AMX: {_yes(machine['amx'])}; {machine['libc']}, torch {machine['torch']}, Python {machine['python']}."
    )


def title(options: Results) -> str:
    """Return the heading of one run."""
    plural = "" if options["threads"] == 1 else "s"
    words = [f"{options['dtype']}, {options['device']}, {options['threads']} thread{plural}"]
    words += [SAID[k] for k in SAID if options.get(k)]
    words += ["each variant in a process of its own"] if options.get("apart") else []
    return ", ".join(words + ([f"without {options['skip']}"] if options["skip"] else []))


def options_text(options: Results, spread: str = "") -> str:
    """Return how a run was measured, and how its figures are to be read."""
    clock = "process CPU time" if options["cpu_time"] else "wall-clock time"
    return textwrap.fill(
        f"Scale {options['scale']:g}, {options['rounds']} rounds, {clock}. A figure is autocast's time over the "
        f"variant's, median of the rounds{spread}: above 1 is faster. Columns with Inductor are compared with autocast "
        "through Inductor. For models on images autocast is the better of contiguous and channels_last.",
        120,
    )


def rates_text(results: Results) -> list[str]:
    """Return what the machine did while a run was measured, from the slowest to the fastest of its models."""
    rates = [e["rates"] for models in results.values() for e in models.values() if "rates" in e]
    if not rates:
        return []
    products = [
        f"{_from_to([r['gemm'][dtype] for r in rates])} GFLOP/s in {dtype}"
        for dtype in dict.fromkeys(d for r in rates for d in r["gemm"])
    ]
    return ["", f"Large products: {', '.join(products)}. Copies: {_from_to([r['copy'] for r in rates])} GB/s."]


def _from_to(values: Sequence[float]) -> str:
    low, high = f"{min(values) / 1e9:.0f}", f"{max(values) / 1e9:.0f}"
    return low if low == high else f"{low} to {high}"


def speed_table(mode: str, results: Results) -> list[str]:
    """Return the ratios of a mode, a row a model and a column a variant; last, those against autocast's other mode."""
    names = columns(results)
    others = [(n, EAGER, "eager autocast") for n in names if COMPILED in n]
    rows = [r for entry in results.values() for r in entry["variants"].items()]
    met = {n for n, row in rows if row.get(COMPILED_AUTOCAST)}
    others += [(n, COMPILED_AUTOCAST, "autocast + Inductor") for n in names if n in met]
    heads = [*names, *(f"{n}, against {rival}" for n, _, rival in others)]
    lines = ["", f"### {mode.capitalize()}", "", f"| model | autocast, ms | {' | '.join(heads)} |"]
    lines.append("|---|---:|" + "---|" * len(heads))
    for model, entry in results.items():
        cells = [_spread(entry["variants"].get(n), SAME) for n in names]
        cells += [_spread(entry["variants"].get(n), which) for n, which, _ in others]
        lines.append(f"| {model} | {baseline(entry)} | {' | '.join(cells)} |")
    means = [mean(results, n, SAME) for n in names] + [mean(results, n, which) for n, which, _ in others]
    return [*lines, f"| **geometric mean** | | {' | '.join(f'**{m}**' for m in means)} |"]


def columns(results: Results) -> list[str]:
    """Return the variants of all models that are no baseline, in the order of the first that has most of them."""
    longest = max(results.values(), key=lambda e: len(e["variants"]))
    every = [*longest["variants"], *(n for e in results.values() for n in e["variants"])]
    baselines = {e[k] for e in results.values() for k in ("baseline", "compiled_baseline")}
    return [n for n in dict.fromkeys(every) if n not in baselines and not n.startswith("autocast channels_last")]


def mean(results: Results, name: str, which: str) -> str:
    """Return the geometric mean of a column, of the models that have it."""
    rows = [e["variants"].get(name, {}).get(which) for e in results.values()]
    logs = [math.log(r["ratio"]) for r in rows if r]
    return f"{math.exp(statistics.fmean(logs)):.2f}" if logs else ""


def cost_table(mode: str, results: Results) -> list[str]:
    """Return what was measured once: a row a model and variant. Empty where it cannot be seen."""
    rows = [(model, n, row) for model, entry in results.items() for n, row in entry["variants"].items()]
    on_gpu = any(row.get("kernels") for *_, row in rows)
    heads = ["model", "variant", "ms", "x limit", "casts", "MB cast", "saved", "copies", "peak", "held", "first call"]
    heads += ["passes", "kernels", "kernel ms", "busy"] if on_gpu else ["passes"]
    lines = [
        "",
        f"| {' | '.join(heads)} |",
        "|---|---|" + "---:|" * (13 if on_gpu else 10),
    ]
    return lines + [f"| {m} | {n} | {' | '.join(_costs(row) + _kernels(row, on_gpu))} |" for m, n, row in rows]


def _kernels(row: Results, on_gpu: bool) -> list[str]:
    """Return how many kernels a step has, their milliseconds, and the part of the step in which one runs."""
    found = row.get("kernels")
    if not on_gpu:
        return []
    return [f"{found['count']}", f"{found['ms']:.1f}", f"{found['ms'] / row['ms']:.2f}"] if found else [""] * 3


def _costs(row: Results) -> list[str]:
    if "error" in row:
        return [f"fails: {row['error']}".replace("|", "/"), *[""] * 9]
    casts, saved = row["casts"] or {}, row["saved"] or {}
    activations = saved.get("activations")
    kept = [_mb(activations), _mb(saved.get("weight_copies"))]
    if saved and activations is None:
        kept = [f"{_mb(saved['total'])} in all", ""]
    count = [f"{casts['count']}", _mb(casts["bytes"])] if casts else ["", ""]
    memory = [_mb(row["peak_bytes"]), _mb(row["held_bytes"])]
    seconds = [_seconds(row["first_call_s"], 1), _seconds(row["passes_s"], 2)]
    return [f"{row['ms']:.1f}", f"{row['over_limit']:.1f}", *count, *kept, *memory, *seconds]


def _seconds(found: float | None, digits: int) -> str:
    return "" if found is None else f"{found:.{digits}f}"


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def _yes(held: bool) -> str:
    return "yes" if held else "no"


def ratio(row: Results | None, which: str) -> str:
    """Return the median of a row's ratios; empty where it has none."""
    return f"{row[which]['ratio']:.2f}" if row and row.get(which) else ""


def _spread(row: Results | None, which: str) -> str:
    if row and "error" in row:
        return "fails"
    quartiles = f" [{row[which]['p25']:.2f}-{row[which]['p75']:.2f}]" if row and row.get(which) else ""
    return ratio(row, which) + quartiles


def baseline(entry: Results) -> str:
    """Return the milliseconds of autocast."""
    return f"{entry['variants'][entry['baseline']]['ms']:.1f}" if entry["baseline"] else "fails"
