"""Load the model that TARGET names, as it is or converted; call it once, and return what was captured.

``captured(args)``, with the target "model.py:build" and the policy "bf16", is a ``Conversion`` with a graph or more.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import Conversion, conversion_of
from amp_graph.cli.target import Target, load_target, named
from amp_graph.convert import convert, revert
from amp_graph.errors import AmpGraphError, AmpGraphWarning, CaptureError
from amp_graph.lists.errors import Attempt
from amp_graph.numerics.compare import projected
from amp_graph.passes.torch_compat.dynamo_settings import errors_not_logged
from amp_graph.policy import Policy
from amp_graph.step.train_step import TrainStep


def plain_target(args: argparse.Namespace) -> Target:
    """Return TARGET as it was before a conversion, in the mode that was asked for.

    Its policy: that of the command line, or else the one that TARGET itself converted the model with.
    """
    target = load_target(args.target, args.input)
    present = conversion_of(target.model)
    wanted = Policy.parse(args.policy) if args.policy is not None or present is None else present.policy
    if present is not None:
        revert(target.model)
    if args.training is not None:
        target.model.train(args.training)
    return replace(target, policy=wanted)


def captured(args: argparse.Namespace) -> Conversion:
    """Convert TARGET and call it once. Raises CaptureError if nothing is captured."""
    with users_code(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", AmpGraphWarning)
        target = plain_target(args)
        target.call(convert(target.model, target.policy))
    for warning in seen:
        print(f"warning: {warning.message}", file=sys.stderr)
    found = conversion_of(target.model)
    assert found is not None, "convert attaches a conversion"
    if not found.graphs:
        causes = [*(f"{s.where}: {s.reason}" for s in found.diagnostics.skips), *found.diagnostics.notes]
        raise CaptureError(
            f"nothing was captured of {type(found.model).__name__} under policy {target.policy}"
            f"{''.join(f'{chr(10)}    {cause}' for cause in dict.fromkeys(causes))}\n"
            "  legal: a level other than O0; a forward in Python that torch.compile can capture\n"
            "  fix:   --policy bf16, or TORCH_LOGS=graph_breaks amp-graph dump ... shows where capture stops"
        )
    return found


def captured_step(args: argparse.Namespace) -> str:
    """Return the text of TARGET's whole training step with the optimizer ``args.step``, one of torch.optim's."""
    with users_code():
        target = plain_target(args)
        target.model.train(args.training is not False)
        kind = getattr(torch.optim, args.step)
        step = TrainStep(target.model, any_loss, kind(target.model.parameters(), lr=0.1), target.policy)
        step(target.named_inputs())
    return step.graph_text()


def target_and_batch(args: argparse.Namespace, command: str) -> tuple[Target, tuple[Any, ...], Any]:
    """Return TARGET in the mode that was asked for, the batch of ``--batch`` or its own inputs, and a loss function."""
    if args.loss is not None and args.batch is None:
        raise AmpGraphError(
            f"{command}: --loss needs targets, which only a batch in a file has\n  legal: --loss with --batch\n"
            "  fix:   torch.save((x, y), 'batch.pt'), then --batch batch.pt"
        )
    target = load_target(args.target, args.input, has_batch=args.batch is not None)
    target.model.train(args.training is not False)
    if args.batch is None:
        batch: tuple[Any, ...] = (target.named_inputs() if target.kwargs else target.args,)
    else:
        batch = read_batch(args.batch, command)
    return target, batch, any_loss if args.loss is None and len(batch) == 1 else args.loss and named(args.loss)


def read_batch(path: str, command: str) -> tuple[Any, ...]:
    """Read a batch that ``torch.save`` wrote: tensors, tuples, lists and dicts of them; nothing else is unpickled."""
    with Attempt() as tried:
        batch = torch.load(path, map_location="cpu", weights_only=True)
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    raise AmpGraphError(
        f"{command}: --batch {path} is not a batch of tensors: {tried.reason}\n"
        "  legal: what torch.save((inputs, *targets), path) wrote: tensors, in tuples, lists and dicts\n"
        "  fix:   torch.save((x, y), 'batch.pt'), then --batch batch.pt"
    ) from tried.error


def any_loss(out: Any) -> torch.Tensor:
    """Return the loss that a model's result has, else the mean of its first floating-point output."""
    floats = (t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())
    return next(floats).float().mean() if (loss := _own_loss(out)) is None else loss


def loss_or_mixture(out: Any) -> torch.Tensor:
    """Return the model's loss, or a random mixture of its outputs: the mean of a norm's output has no gradient."""
    found = projected(out) if (loss := _own_loss(out)) is None else loss
    return torch.zeros(()) if found is None else found


def _own_loss(out: Any) -> Any:
    return out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)


@contextmanager
def users_code() -> Iterator[None]:
    """Keep what the user's code prints out of our output, and torch from logging errors that it also raises."""
    with errors_not_logged(), redirect_stdout(sys.stderr):
        yield
