"""Convert the model that TARGET names, call it once, and return what was captured.

``captured("model.py:build", ["f32[8,16]"], "bf16")`` is a ``Conversion`` with at least one graph.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.backend import Compile
from amp_graph.conversion import Conversion, conversion_of
from amp_graph.convert import convert, revert
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.target import load_target
from amp_graph.train_step import TrainStep


def captured(
    text: str,
    inputs: Sequence[str] = (),
    policy: str | None = None,
    training: bool | None = None,
    compile: Compile = "eager",
) -> Conversion:
    """Capture TARGET; ``training`` None leaves the model's mode as it is. Raises where nothing is captured.

    A model that TARGET has converted itself keeps its own policy where ``policy`` is None.
    """
    with redirect_stdout(sys.stderr):  # what the user's code prints is no part of our output
        target = load_target(text, inputs)
        model = target.model
        if training is not None:
            model.train(training)
        if compile != "eager" and conversion_of(model) is not None:
            policy = policy or str(conversion_of(model).policy)  # type: ignore[union-attr]
            revert(model)
        if policy is not None or conversion_of(model) is None:
            convert(model, policy, compile=compile)
        with warnings.catch_warnings(record=True) as seen, _quiet():
            warnings.simplefilter("always", AmpGraphWarning)
            model(*target.args, **target.kwargs)
    for warning in seen:
        print(f"warning: {warning.message}", file=sys.stderr)
    found = conversion_of(model)
    assert found is not None, "convert attaches a conversion"
    if not found.graphs:
        raise CaptureError(_nothing(found))
    return found


def captured_step(text: str, inputs: Sequence[str], policy: str | None, training: bool | None, optimizer: str) -> str:
    """Return the text of TARGET's whole training step with ``optimizer``, one of torch.optim's.

    The loss is the model's own where it returns one, else the mean of its first floating output.
    """
    with redirect_stdout(sys.stderr):
        target = load_target(text, inputs)
        target.model.train(True if training is None else training)
        if conversion_of(target.model) is not None:
            revert(target.model)
        made = getattr(torch.optim, optimizer)(target.model.parameters(), lr=0.1)
        step = TrainStep(target.model, _any_loss, made, policy)
        given = inspect.signature(target.model.forward).bind(*target.args, **target.kwargs).arguments
        with _quiet():
            step(dict(given))
    return step.graph_text()


def _any_loss(out: Any) -> torch.Tensor:
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    return next(t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()).float().mean()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that arrives as an exception anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _nothing(found: Conversion) -> str:
    if found.policy.level == "O0":
        return (
            "nothing to show: level O0 runs the model as it is written, and captures nothing\n"
            "  legal: level O1\n  fix:   --policy bf16"
        )
    causes = [*(f"{s.where}: {s.reason}" for s in found.pieces), *found.notes]
    listed = "".join(f"\n    {cause}" for cause in dict.fromkeys(causes))
    return (
        f"nothing was captured of {type(found.model).__name__}{':' if listed else ''}{listed}\n"
        "  legal: a model whose forward computes on tensors in Python that torch.compile can capture\n"
        "  fix:   TORCH_LOGS=graph_breaks amp-graph dump ... says where it stops"
    )
