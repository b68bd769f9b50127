"""``amp-graph locate``: names the operation that makes the first infinity or NaN of a model's batch.

Before: TARGET, and a batch in a file, or the inputs that TARGET gives. After: what ``amp_graph.locate`` returns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amp_graph.cli.capture_target import any_loss, users_code
from amp_graph.cli.target import load_target, named
from amp_graph.cli.terminal import write_json
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.numerics.overflow.locate import locate


def run(args: argparse.Namespace) -> int:
    """Run the batch of TARGET and print what was found; status 0 where nothing was, and 3 where something was."""
    with users_code():
        target = load_target(args.target, args.input, has_batch=args.batch is not None)
        target.model.train(True if args.training is None else args.training)
        loss_fn, batch = _loss_and_batch(args, target.model, target.args, dict(target.kwargs))
        found = locate(target.model, batch, loss_fn, policy=args.policy, scale=args.scale)
    if args.json:
        write_json(found.to_dict(), sys.stdout)
    else:
        print(found.text(), end="")
    return 3 if found else 0


def _loss_and_batch(
    args: argparse.Namespace, model: torch.nn.Module, given: tuple[Any, ...], named_inputs: dict[str, Any]
) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
    """Return the loss function, and the batch: that of the file, else the inputs of TARGET."""
    loss_fn = named(args.loss) if args.loss is not None else None
    if args.batch is not None:
        batch = _read(args.batch)
        batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return (loss_fn, batch) if loss_fn is not None or len(batch) > 1 else (any_loss, batch)
    if loss_fn is not None:
        raise AmpGraphError(
            "locate: --loss needs targets, which only a batch in a file has\n  legal: --loss with --batch\n"
            "  fix:   torch.save((x, y), 'batch.pt'), then --batch batch.pt"
        )
    return any_loss, (named_inputs if named_inputs else tuple(given),)


def _read(path: str) -> Any:
    """Read a batch that ``torch.save`` wrote: tensors, tuples, lists and dicts of them; nothing else is unpickled."""
    try:
        with Attempt(OSError) as tried:
            batch = torch.load(Path(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise AmpGraphError(f"locate: --batch {path}: {error.strerror}\n  fix:   --batch batch.pt") from error
    if tried.error is not None:
        told = first_line(tried.error) or type(tried.error).__name__
        raise AmpGraphError(
            f"locate: --batch {path} is not a batch of tensors: {told}\n"
            "  legal: what torch.save((inputs, *targets), path) wrote: tensors, in tuples, lists and dicts\n"
            "  fix:   torch.save((x, y), 'batch.pt')"
        ) from tried.error
    return batch
