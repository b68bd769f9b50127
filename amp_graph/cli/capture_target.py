"""Convert the model that TARGET names, call it once, and return what was captured.

``captured("model.py:build", ["f32[8,16]"], "bf16")`` is a ``Conversion`` with at least one graph.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.capture.dynamo_backend import Compile
from amp_graph.capture.sensitivity_sample import Sampled, measure
from amp_graph.cli.target import load_target
from amp_graph.convert import convert, refuse_what_cannot_be_converted, revert, warn_of_unmatched
from amp_graph.errors import AmpGraphWarning, CaptureError, PolicyError
from amp_graph.policy import Policy
from amp_graph.step.train_step import TrainStep


def captured(
    text: str,
    inputs: Sequence[str] = (),
    policy: str | None = None,
    training: bool | None = None,
    compile: Compile = "eager",
) -> Conversion:
    """Capture TARGET; ``training`` None keeps the model's mode. Raises if nothing is captured.

    A model that TARGET itself converted keeps its policy if ``policy`` is None.
    """
    with redirect_stdout(sys.stderr):  # keep the user's prints out of our output
        target = load_target(text, inputs)
        model = target.model
        if training is not None:
            model.train(training)
        if compile != "eager" and conversion_of(model) is not None:
            policy = policy or str(conversion_of(model).policy)  # type: ignore[union-attr]
            revert(model)
        if policy is not None or conversion_of(model) is None:
            convert(model, policy, compile=compile)
        with warnings.catch_warnings(record=True) as seen, quiet():
            warnings.simplefilter("always", AmpGraphWarning)
            model(*target.args, **target.kwargs)
    for warning in seen:
        print(f"warning: {warning.message}", file=sys.stderr)
    found = conversion_of(model)
    assert found is not None, "convert attaches a conversion"
    if not found.graphs:
        raise CaptureError(_nothing(found))
    return found


def sampled(
    text: str, inputs: Sequence[str] = (), policy: str | None = None, training: bool | None = None
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], Policy, list[Sampled]]:
    """Run TARGET once in fp32, forward and backward; return the model, its loss, the policy, and the measurements.

    The loss is the model's own if it returns one, else a fixed random mixture of its floating-point outputs.
    """
    with redirect_stdout(sys.stderr):
        target = load_target(text, inputs)
        model, present = target.model, conversion_of(target.model)
        wanted = Policy.parse(policy) if policy is not None or present is None else present.policy
        if present is not None:
            revert(model)
        refuse_what_cannot_be_converted(model, wanted)
        if wanted.level != "O1":
            raise PolicyError(
                f"plan: level {wanted.level} is not supported: plans are for fp32 parameters\n"
                "  legal: level O1\n  fix:   --policy bf16"
            )
        warn_of_unmatched(model, wanted)
        if training is not None:
            model.train(training)

        def loss(one: torch.nn.Module) -> torch.Tensor:
            return loss_or_mixture(one(*target.args, **target.kwargs))

        with quiet():
            return model, loss, wanted, _measured(model, wanted, loss)


def _measured(model: torch.nn.Module, policy: Policy, loss: Callable[[torch.nn.Module], torch.Tensor]) -> list[Sampled]:
    try:
        return measure(model, policy, loss)
    except CaptureError as error:
        raise CaptureError(
            f"plan: the loss of {type(model).__name__} does not come from a captured graph, or has no gradient\n"
            "  legal: a TARGET whose forward is captured, at least in part, and runs with gradients\n"
            "  fix:   amp-graph dump TARGET shows what is captured"
        ) from error


def captured_step(text: str, inputs: Sequence[str], policy: str | None, training: bool | None, optimizer: str) -> str:
    """Return the text of TARGET's whole training step with ``optimizer``, one of torch.optim's.

    The loss is the model's own if it returns one, else the mean of its first floating-point output.
    """
    with redirect_stdout(sys.stderr):
        target = load_target(text, inputs)
        target.model.train(True if training is None else training)
        if conversion_of(target.model) is not None:
            revert(target.model)
        made = getattr(torch.optim, optimizer)(target.model.parameters(), lr=0.1)
        step = TrainStep(target.model, any_loss, made, policy)
        given = inspect.signature(target.model.forward).bind(*target.args, **target.kwargs).arguments
        with quiet():
            step(dict(given))
    return step.graph_text()


def any_loss(out: Any) -> torch.Tensor:
    """Return the loss that a model's result has, else the mean of its first floating-point output."""
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    return next(t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()).float().mean()


def loss_or_mixture(out: Any) -> torch.Tensor:
    """Return the model's loss, or a random mixture of its outputs: the mean of a norm's output has no gradient."""
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    drawn = torch.Generator().manual_seed(0)
    parts = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
    mixed = [(t.float() * torch.randn(t.shape, generator=drawn).to(t.device)).mean() for t in parts]
    return torch.stack(mixed).sum() if mixed else torch.zeros(())


@contextmanager
def quiet() -> Iterator[None]:
    """Stop torch from logging tracebacks of errors that it also raises."""
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
            "nothing to show: level O0 runs the model unchanged and captures nothing\n"
            "  legal: level O1\n  fix:   --policy bf16"
        )
    causes = [*(f"{s.where}: {s.reason}" for s in found.log.skips), *found.said.notes]
    listed = "".join(f"\n    {cause}" for cause in dict.fromkeys(causes))
    return (
        f"nothing was captured of {type(found.model).__name__}{':' if listed else ''}{listed}\n"
        "  legal: a model whose forward computes on tensors in Python that torch.compile can capture\n"
        "  fix:   TORCH_LOGS=graph_breaks amp-graph dump ... shows where capture stops"
    )
