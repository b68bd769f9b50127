"""``amp-graph search``: finds the fastest policy of TARGET that is exact enough, by measuring on this machine."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.cli.capture_target import read_batch, target_and_batch, users_code
from amp_graph.cli.terminal import Told
from amp_graph.errors import AmpGraphError
from amp_graph.numerics.batches import output_and_loss
from amp_graph.search.search import Limits, search
from amp_graph.step.step_arguments import call_model


def run(args: argparse.Namespace) -> Told:
    """Search, with a line on stderr for each policy; a model in evaluation mode is called without gradients."""
    with users_code():
        target, batch, loss_fn = target_and_batch(args, "search")
        if loss_fn is None and target.model.training and len(batch) > 1:
            _refuse_missing_loss(target.model, batch)
        held_out = None if args.held_out is None else _step(read_batch(args.held_out, "search"), loss_fn)
        found = search(
            target.model, _step(batch, loss_fn), budget=args.budget, absolute=args.absolute, held_out=held_out,
            policy=args.policy or "bf16", limits=Limits(args.runs, args.seconds), state=args.state,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    return Told(found.to_dict(), [found.text().removesuffix("\n")])


def _refuse_missing_loss(model: torch.nn.Module, batch: tuple[Any, ...]) -> None:
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError as error:
        raise AmpGraphError(
            f"search: --batch has {len(batch)} parts, which are no arguments of {type(model).__name__}: {error}\n"
            "  legal: --loss, which takes the output and the targets; or a model that returns its loss\n"
            "  fix:   --loss losses.py:loss"
        ) from error


def _step(batch: tuple[Any, ...], loss_fn: Any) -> Callable[[torch.nn.Module], Any]:
    def step(model: torch.nn.Module) -> Any:
        if model.training:
            return output_and_loss(model, loss_fn, batch)[1]
        with torch.no_grad():
            out = call_model(model, batch[0])
        return next(t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())

    return step
