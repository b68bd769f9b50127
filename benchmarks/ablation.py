"""What each optional pass is worth: a step, or a call, without it over with it, in every model in which it fires.

Before: a model, and the passes that changed its graphs. After: for each of them the ratio of time, of peak memory and
of saved memory, without the pass over with it: above 1 is what it gains. Both sides take turns in one process, by its
CPU time; a pass that changes nothing is not measured. ``--table`` writes the Markdown from the JSON; a row that is
there is not measured again, so that a run that was stopped goes on. Rows of several scales stand in one file: what
gains little in small batches may be measured in large ones. A model that cannot be captured one way is left out there.
The passes of a stage are also left out together (``backend``); a stage of which one pass alone fires has its row.
Passes for a device that is not there, which say so, are not measured.

    python benchmarks/ablation.py [--models gpt,lstm] [--ways convert,TrainStep,inference] [--passes lower-linears]
    python benchmarks/ablation.py --table
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from devices import Device
from interleaved import interleaved, quartiles
from library_models import LIBRARY
from models import MODELS, MORE
from result_file import machine
from step_costs import saved_by
from tables import about
from variants import Prepared, Setup, Variant, inference_call, training_step

from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CaptureError
from amp_graph.passes.native.output_file import write_atomically
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import GROUPS, TABLE

RESULTS = Path(__file__).parent / "results" / "ablation"
WAYS = ("convert", "TrainStep", "inference")
# An optional pass stays for a lower quartile of time of BOTH in two models or ONE in one, or memory of LEAN in two.
BOTH, ONE, LEAN = 1.03, 1.10, 1.10
USUAL = (*MODELS, "swin", "bloom", "wav2vec2", "vgg11", "ghostnet", "bert_dropout", "gpt_lora", "gpt_1", *LIBRARY)


@dataclass(frozen=True)
class Row:
    """One pass in one model: ratios without it over with it; ``low`` and ``high`` are the quartiles of the time."""

    name: str
    model: str
    way: str
    changes: int
    time: float
    low: float
    high: float
    peak: float | None = None
    saved: float | None = None
    scale: float = 0.25  # of batches and depths


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(USUAL))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--passes", default="", help="names (default: all that fire)")
    parser.add_argument("--scale", type=float, default=0.5, help="of batches and depths")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=6, help="passes that are timed in turn with one baseline")
    parser.add_argument("--table", action="store_true", help="measure nothing: write the Markdown")
    parser.add_argument("--output", type=Path, default=RESULTS, help="path without suffix")
    options = parser.parse_args(argv)
    for given, legal in ((options.models, MODELS | MORE), (options.ways, WAYS)):
        if unknown := set(given.split(",")) - set(legal):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; legal: {', '.join(legal)}")
    return options


def prepared(model: str, way: str, scale: float, skip: str = "") -> Prepared:
    """Prepare a model, converted without the pass ``skip``, and run it until it has settled."""
    policy = f"bf16,skip={skip.replace('-', '_')}" if skip else "bf16"
    make = inference_call if way == "inference" else training_step
    made = make(model, scale, Variant(way, policy=policy, whole=way == "TrainStep"), Setup())
    for _ in range(3):
        made.run()
    return made


def fired(made: Prepared, way: str) -> dict[str, int]:
    """Return the optional passes that changed a graph of this model, and how many changes they made.

    What runs over the flat graph of a step keeps no record there: each of these counts as one change.
    """
    found = conversion_of(made.converted) if made.converted is not None else None
    captured = made.step.captured if made.step is not None else found.graphs
    optional = {row.name: row for row in TABLE if row.skippable}
    changes: dict[str, int] = {}
    for timed in (t for c in captured for t in c.rewritten.passes):
        if timed.name in optional and timed.result.modified:
            changes[timed.name] = changes.get(timed.name, 0) + len(timed.result.changes)
    if way == "TrainStep":
        changes |= {n: changes.get(n, 1) for n, row in optional.items() if Phase.STEP in row.phases}
    return {name: count for name, count in changes.items() if not (optional[name].worth or "").startswith("not ")}


def groups_of(changes: dict[str, int]) -> dict[str, list[str]]:
    """Return what of each group fired, by its name."""
    found = {group: [name for name in names if name in changes] for group, names in (GROUPS).items()}
    return {group: names for group, names in found.items() if names}


def stays(rows: Sequence[Row]) -> bool:
    """Say whether the measured ``rows`` of one pass are what an optional pass must gain."""
    quick, lean = _best_two(rows, lambda r: r.low), _best_two(rows, _memory)
    return quick[0] >= ONE or quick[1] >= BOTH or lean[1] >= LEAN


def _best_two(rows: Sequence[Row], gain: Callable[[Row], float]) -> list[float]:
    """Return the gains of the two models that gain most; 0 for one that is not there."""
    best: dict[str, float] = {}
    for row in rows:
        best[row.model] = max(best.get(row.model, 0.0), gain(row))
    return [*sorted(best.values(), reverse=True), 0.0, 0.0][:2]


def measured(model: str, way: str, names: dict[str, int], options: argparse.Namespace) -> Iterable[Row]:
    """Time ``names`` in turn with one baseline, and yield a row each."""
    device = Device()
    every = {name: prepared(model, way, options.scale, name) for name in ("", *names)}
    calls: dict[str, Callable[[], object]] = {name: made.run for name, made in every.items()}
    seconds = interleaved(calls, options.rounds, time.process_time, least=0.05)
    peaks = {name: device.peak(made.run) for name, made in every.items()}
    saved = {name: _saved(made, way) for name, made in every.items()}
    for name, changes in names.items():
        low, middle, high = quartiles(seconds[name], seconds[""])
        yield Row(name, model, way, changes, middle, low, high, _over(peaks, name), _over(saved, name), options.scale)


def _saved(made: Prepared, way: str) -> int | None:
    found = saved_by(made, False) if way != "inference" else None
    return found.total if found is not None else None


def _over(values: dict[str, int | None], name: str) -> float | None:
    """Return what a value is without the pass, over with it."""
    without, with_it = values[name], values[""]
    return without / with_it if without and with_it else None


def markdown(held: dict) -> str:
    """Return the table of passes, and below it every row."""
    rows = [Row(**r) for r in held["rows"]]
    scales = sorted({f"{r.scale:g}" for r in rows})
    lines = [
        "# What each optional pass is worth", "", about(held["machine"]), "",
        f"CPU time, {held['options']['threads']} thread; models at {', '.join(scales)} of their sizes. Ratios are "
        f"without the pass over with it: above 1 is a gain. A pass stays if the lower quartile of its time is at least "
        f"{BOTH} in two models or {ONE:.2f} in one, or its peak or saved memory at least {LEAN:.2f} in two, or for "
        "what the last column names. The row of a group leaves out all of its passes.", "",
        "| pass | models in which it fires | best time | where | best memory | where | stays |",
        "|---|---:|---:|---|---:|---|---|",
    ]  # fmt: skip
    worth = {row.name: row.worth or "" for row in TABLE if row.skippable} | dict.fromkeys(GROUPS, "a group")
    lines += [_summary(name, said, [r for r in rows if r.name == name]) for name, said in worth.items()]
    lines += [
        "",
        "| pass | model | way | scale | changes | time | quartiles | peak | saved |",
        "|---|---|---|---:|---:|---:|---|---:|---:|",
    ]
    lines += map(_line, sorted(rows, key=lambda r: (r.name, -r.time)))
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    return (
        f"| {row.name} | {row.model} | {row.way} | {row.scale:g} | {row.changes} | {row.time:.3f} "
        f"| {row.low:.3f}-{row.high:.3f} | {_text(row.peak)} | {_text(row.saved)} |"
    )


def _summary(name: str, worth: str, rows: list[Row]) -> str:
    if not rows:
        return f"| {name} | 0 | | | | | {worth or 'not measured'} |"
    quick = max(rows, key=lambda r: r.time if r.low > 1 else 0)
    lean = max(rows, key=_memory)
    return (
        f"| {name} | {len({r.model for r in rows})} | {quick.time:.2f} | {quick.model}, {quick.way} "
        f"| {_text(_memory(lean))} | {lean.model}, {lean.way} | {'yes' if stays(rows) else worth or '**no**'} |"
    )


def _memory(row: Row) -> float:
    return max(row.peak or -math.inf, row.saved or -math.inf)


def _text(ratio: float | None) -> str:
    return "" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}"


def opened(options: argparse.Namespace) -> dict:
    """Read what was measured, or begin; SystemExit where it is of another machine or other options."""
    path, same = options.output.with_suffix(".json"), {"threads": options.threads}
    held = {"machine": machine("cpu"), "options": same, "rows": []}
    if not path.exists():
        return held
    found = json.loads(path.read_text())
    if not options.table and {k: found[k] for k in ("machine", "options")} != {
        k: held[k] for k in ("machine", "options")
    }:
        raise SystemExit(f"{path} was measured elsewhere, or otherwise\n  fix:   --output another path")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not there yet; writes behind every model."""
    options = parsed(argv)
    torch.set_num_threads(options.threads)
    held = opened(options)
    for model in () if options.table else options.models.split(","):
        for way in options.ways.split(","):
            there = {
                r["name"] for r in held["rows"] if (r["model"], r["way"], r["scale"]) == (model, way, options.scale)
            }
            try:
                names = fired(prepared(model, way, options.scale), way)
            except CaptureError as error:
                print(f"{model}, {way}: left out, {str(error).splitlines()[0]}", flush=True)
                continue
            groups = groups_of(names)
            several = {group: sum(names[n] for n in found) for group, found in groups.items() if len(found) > 1}
            alike = {group: found[0] for group, found in groups.items() if len(found) == 1}
            names |= several
            wanted = options.passes.split(",") if options.passes else list(names)
            left = [n for n in names if n in wanted and n not in there]
            for start in range(0, len(left), options.at_once):
                part = {n: names[n] for n in left[start : start + options.at_once]}
                for row in measured(model, way, part, options):
                    same = [group for group, name in alike.items() if name == row.name]
                    held["rows"] += [asdict(replace(row, name=name)) for name in (row.name, *same)]
                    print(
                        f"{row.name}, {row.model}, {row.way}: time {row.time:.3f}, peak {_text(row.peak)}", flush=True
                    )
                write_atomically(options.output.with_suffix(".json"), json.dumps(held, indent=1) + "\n")
                torch._dynamo.reset()
                gc.collect()
    options.output.with_suffix(".md").write_text(markdown(held))


if __name__ == "__main__":
    main()
