"""``amp-graph calibrate``: measures this machine's rates and writes the file that the planner reads.

With a TARGET it measures the ranges of that model's values instead, as ``amp_graph.calibrate`` does.
"""

from __future__ import annotations

import argparse
import contextlib

import torch

from amp_graph.cli.calibration import calibrate
from amp_graph.cli.capture_target import plain_target, users_code
from amp_graph.cli.terminal import write_json, write_table
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError
from amp_graph.numerics.calibrate import calibrate as calibrate_values
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.passes.precision.machine_rates import FAMILIES, class_of, machine_text, place_of_own_file

COLUMNS = ("rate", "dtype", "measured", "class")
DEFAULT = "calibration.json"


def run(args: argparse.Namespace) -> int:
    """Measure, print beside the built-in rates, and write the file."""
    if args.target is not None:
        return _of_model(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise AmpGraphError("calibrate: torch finds no CUDA device\n  legal: cpu\n  fix:   --device cpu")
    path = args.output
    if path is None:
        path = place_of_own_file()
        with contextlib.suppress(OSError):  # writing says so
            path.parent.mkdir(parents=True, exist_ok=True)
    found, known = calibrate(args.device), class_of(args.device)
    write_or_refuse(path, machine_text(found), "calibrate", "--output machine.toml")
    rates = [(name, "", getattr(found, name), getattr(known, name)) for name in ("call", "kept")]
    rates += [(f, dtype, rate, known.rates[f][dtype]) for f in FAMILIES for dtype, rate in found.rates[f].items()]
    if args.json:
        told = [dict(zip(COLUMNS, one, strict=True)) for one in rates]
        write_json({"machine": found.description, "file": str(path), "rates": told})
        return 0
    write_table(COLUMNS, [(name, dtype, f"{ours:.2e}", f"{theirs:.2e}") for name, dtype, ours, theirs in rates])
    print(f"{found.description}\nwritten to {path}; plans read {place_of_own_file()}, or what AMP_GRAPH_MACHINE names")
    return 0


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
        write_json({**told, "loss_scale": scale.scale, "underflow": scale.underflow})
        return 0
    print(f"{found.text(dtype)}\n\nwritten to {path}: policy '{found.policy},calibration={path}' uses it")
    return 0
