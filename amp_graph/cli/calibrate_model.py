"""``amp-graph calibrate TARGET``: measures the ranges of a model's values, and writes the file that a policy names.

Before: ``model.py:build``. After: ``calibration.json``, for ``--policy fp16,calibration=calibration.json``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from amp_graph.capture.conversion import conversion_of
from amp_graph.cli.capture_target import quiet
from amp_graph.cli.target import Target, load_target
from amp_graph.cli.terminal import write_json
from amp_graph.convert import revert
from amp_graph.numerics.calibrate import calibrate
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.policy import Policy

DEFAULT = "calibration.json"


def calibrate_model(
    target: str, inputs: Sequence[str], policy: str | None, training: bool | None, output: str | None, as_json: bool
) -> int:
    """Measure TARGET on its inputs, and the gradients of a loss that it returns; print, and write the file."""
    found, dtype = _measured(target, inputs, policy, training)
    path = output or DEFAULT
    found.save(path)
    if as_json:
        scale = found.loss_scale(dtype)
        told = {"file": path, "model": found.model, "gradients": found.gradients, "operations": found.rows(dtype)}
        write_json({**told, "loss_scale": scale.scale, "underflow": scale.underflow}, sys.stdout)
        return 0
    print(f"{found.text(dtype)}\n\nwritten to {path}: policy '{found.policy},calibration={path}' uses it")
    return 0


def _measured(text: str, inputs: Sequence[str], policy: str | None, training: bool | None) -> tuple[Calibration, str]:
    """Return the calibration of TARGET, and the low precision of the policy."""
    with redirect_stdout(sys.stderr):
        loaded = load_target(text, inputs)
        model = loaded.model
        if conversion_of(model) is not None:
            revert(model)
        if training is not None:
            model.train(training)
        wanted = Policy.parse(policy or "fp16")
        with quiet():
            found = calibrate(model, [(_batch(loaded),)], policy=wanted, progress=False)
        device = next((p.device.type for p in model.parameters()), "cpu")
    return found, str(wanted.torch_dtype(device)).removeprefix("torch.")


def _batch(loaded: Target) -> Any:
    """Return the inputs of TARGET as one batch: a tuple, or a dict if some are given by name."""
    if not loaded.kwargs:
        return loaded.args
    return dict(inspect.signature(loaded.model.forward).bind(*loaded.args, **loaded.kwargs).arguments)
