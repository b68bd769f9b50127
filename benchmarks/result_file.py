"""The file of results of ``speed.py``: what it holds, and what may be written into it.

    {"format": 2, "machine": {...}, "runs": [{"options": {...}, "results": {"training": {"gpt": {...}}}}]}

One machine with its versions a file, one entry in "runs" for each set of options. A run of some models, modes or more
variants is written into the entry of its options, model by model, in the place of what was there: the variants of a
model were timed in turn, and their ratios belong together.
"""

import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from amp_graph.passes.native.output_file import write_atomically

FORMAT = 2
Results = dict[str, Any]


def machine(device: str) -> dict[str, object]:
    """Return what the figures depend on: the processor, and versions."""
    found = {
        "processor": processor(Path("/proc/cpuinfo")) or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "libc": " ".join(platform.libc_ver()),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
    }
    return found | ({"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if device == "cuda" else {})


def processor(cpuinfo: Path) -> str:
    """Return the processor's name, family and model: one name can stand for cores of which one is twice as fast."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    first = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    numbers = [f"{word} {first[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in first]
    return first.get("model name", "") + (f" ({', '.join(numbers)})" if numbers else "")


def opened(path: Path, about: dict[str, object]) -> Results:
    """Read a file, or begin one; SystemExit where it is of another machine, other versions or another form."""
    if not path.exists():
        return {"format": FORMAT, "machine": about, "runs": []}
    held = json.loads(path.read_text())
    if held.get("format") != FORMAT:
        raise SystemExit(_refusal(path, f"is of format {held.get('format', 1)}, not {FORMAT}"))
    other = [f"{k}: {held['machine'].get(k)} is not {v}" for k, v in about.items() if held["machine"].get(k) != v]
    if other:
        raise SystemExit(_refusal(path, f"was measured elsewhere ({'; '.join(other)})"))
    return held


def run_of(held: Results, options: dict[str, object]) -> Results:
    """Return the entry of these options, a new one behind the others where there is none."""
    for run in held["runs"]:
        if run["options"] == options:
            return run
    held["runs"].append({"options": options, "results": {}})
    return held["runs"][-1]


def refuse_to_lose(path: Path, run: Results, mode: str, model: str, names: Iterable[str]) -> None:
    """Raise SystemExit where a model's rows are there of which this run would measure only some."""
    there = run["results"].get(mode, {}).get(model, {}).get("variants", {})
    lost = [name for name in there if name not in names]
    if lost:
        what = f"has rows of {model}, {mode}, that this run leaves out: {', '.join(lost)}"
        raise SystemExit(_refusal(path, what) + ", or measure these as well (--variants, --compiled)")


def written(path: Path, held: Results, run: Results, mode: str, model: str, entry: Results) -> None:
    """Put one model's figures in their place and write the file."""
    run["results"].setdefault(mode, {})[model] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = [r for r in held["runs"] if r["results"]]
    write_atomically(path, json.dumps(held | {"runs": measured}, indent=1) + "\n")


def _refusal(path: Path, what: str) -> str:
    return f"{path} {what}; nothing was measured\n  fix:   --output another path"
