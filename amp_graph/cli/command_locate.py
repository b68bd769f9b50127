"""``amp-graph locate``: names the operation that makes the first infinity or NaN of a model's batch.

Before: TARGET, and a batch in a file, or the inputs that TARGET gives. After: what ``amp_graph.locate`` returns.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from amp_graph.cli.capture_target import any_loss, users_code
from amp_graph.cli.target import load_target, named
from amp_graph.cli.terminal import write_json
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.numerics.overflow.locate import locate


def run(args: argparse.Namespace) -> int:
    """Run the batch of TARGET and print what was found; status 0 where nothing was, and 3 where something was."""
    if args.loss is not None and args.batch is None:
        raise AmpGraphError(
            "locate: --loss needs targets, which only a batch in a file has\n  legal: --loss with --batch\n"
            "  fix:   torch.save((x, y), 'batch.pt'), then --batch batch.pt"
        )
    with users_code():
        target = load_target(args.target, args.input, has_batch=args.batch is not None)
        target.model.train(args.training is not False)
        if args.batch is not None:
            batch = _read(args.batch)
        else:
            batch = (target.named_inputs() if target.kwargs else target.args,)
        loss_fn = any_loss if args.loss is None and len(batch) == 1 else args.loss and named(args.loss)
        found = locate(target.model, batch, loss_fn, policy=args.policy, scale=args.scale)
    if args.json:
        write_json(found.to_dict())
    else:
        print(found.text(), end="")
    return 3 if found else 0


def _read(path: str) -> tuple[Any, ...]:
    """Read a batch that ``torch.save`` wrote: tensors, tuples, lists and dicts of them; nothing else is unpickled."""
    with Attempt() as tried:
        batch = torch.load(path, map_location="cpu", weights_only=True)
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    raise AmpGraphError(
        f"locate: --batch {path} is not a batch of tensors: {tried.reason}\n"
        "  legal: what torch.save((inputs, *targets), path) wrote: tensors, in tuples, lists and dicts\n"
        "  fix:   torch.save((x, y), 'batch.pt'), then --batch batch.pt"
    ) from tried.error
