"""``amp-graph calibrate``: measures this machine's rates and writes the file that the planner reads.

With a TARGET it measures the ranges of that model's values instead, as ``amp_graph.calibrate`` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from amp_graph.cli.calibration import calibrate
from amp_graph.cli.capture_target import plain_target, users_code
from amp_graph.cli.terminal import write_json, write_table
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError
from amp_graph.numerics.calibrate import calibrate as calibrate_values
from amp_graph.passes.native.output_file import write_atomically
from amp_graph.passes.precision.machine_rates import FAMILIES, Machine, class_of, machine_text, place_of_own_file

KEYS = ("rate", "dtype", "measured", "class")
COLUMNS = ("rate", "dtype", "this machine", "its class", "ratio")


def run(args: argparse.Namespace) -> int:
    """Measure, print beside the built-in rates, and write the file."""
    if args.target is not None:
        return _of_model(args)
    if args.input or args.policy or args.training is not None:
        raise AmpGraphError(
            "calibrate: --input, --policy, --train and --eval are for a TARGET, and there is none\n"
            "  legal: amp-graph calibrate, for this machine\n  fix:   amp-graph calibrate model.py:build --policy fp16"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise AmpGraphError("calibrate: torch finds no CUDA device\n  legal: cpu\n  fix:   --device cpu")
    path = Path(args.output) if args.output else place_of_own_file()
    found = calibrate(args.device)
    rates = list(_rates(found, class_of(args.device)))
    if not args.json:
        write_table(COLUMNS, [(_row(*one), "") for one in rates], sys.stdout)
    _write(path, machine_text(found))
    if args.json:
        told = [dict(zip(KEYS, one, strict=True)) for one in rates]
        write_json({"machine": found.description, "file": str(path), "rates": told}, sys.stdout)
        return 0
    used = "plans read it" if path == place_of_own_file() else f"AMP_GRAPH_MACHINE={path} uses it"
    print(f"{found.description}\nwritten to {path}: {used}")
    return 0


def _rates(found: Machine, known: Machine) -> Iterator[tuple[str, str, float, float]]:
    """Yield each rate of this machine beside that of its class."""
    for name in ("call", "kept"):
        yield name, "", getattr(found, name), getattr(known, name)
    for family in FAMILIES:
        for dtype, rate in found.rates[family].items():
            yield family, dtype, rate, known.rates[family][dtype]


def _row(name: str, dtype: str, ours: float, theirs: float) -> tuple[str, ...]:
    return name, dtype, f"{ours:.2e}", f"{theirs:.2e}", f"{ours / theirs:.2f}"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise AmpGraphError(
            f"calibrate: cannot write {path}: {getattr(error, 'strerror', None) or error}\n"
            "  legal: a file in a directory that exists or can be created\n  fix:   --output machine.toml"
        ) from error


# -- the ranges of a model ----------------------------------------------------------------------------


DEFAULT = "calibration.json"


def _of_model(args: argparse.Namespace) -> int:
    """Measure TARGET on its inputs, and the gradients of a loss that it returns; print, and write the file."""
    with users_code():
        target = plain_target(args, "fp16")
        batch = target.named_inputs() if target.kwargs else target.args
        found = calibrate_values(target.model, [(batch,)], policy=target.policy, progress=False)
    dtype = str(target.policy.torch_dtype(device_of_model(target.model) or "cpu")).removeprefix("torch.")
    path = args.output or DEFAULT
    found.save(path)
    if args.json:
        scale = found.loss_scale(dtype)
        told = {"file": path, "model": found.model, "gradients": found.gradients, "operations": found.rows(dtype)}
        write_json({**told, "loss_scale": scale.scale, "underflow": scale.underflow}, sys.stdout)
        return 0
    print(f"{found.text(dtype)}\n\nwritten to {path}: policy '{found.policy},calibration={path}' uses it")
    return 0
