"""``amp-graph calibrate TARGET``: measures the ranges of a model's values, and writes the file that a policy names.

Before: ``model.py:build``. After: ``calibration.json``, for ``--policy fp16,calibration=calibration.json``.
"""

from __future__ import annotations

import argparse
import sys

from amp_graph.cli.capture_target import plain_target, users_code
from amp_graph.cli.terminal import write_json
from amp_graph.devices import device_of_model
from amp_graph.numerics.calibrate import calibrate

DEFAULT = "calibration.json"


def calibrate_model(args: argparse.Namespace) -> int:
    """Measure TARGET on its inputs, and the gradients of a loss that it returns; print, and write the file."""
    with users_code():
        target = plain_target(args, "fp16")
        batch = target.named_inputs() if target.kwargs else target.args
        found = calibrate(target.model, [(batch,)], policy=target.policy, progress=False)
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
