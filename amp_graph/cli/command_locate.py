"""``amp-graph locate``: names the operation that makes the first infinity or NaN of a model's batch.

Before: TARGET, and a batch in a file, or the inputs that TARGET gives. After: what ``amp_graph.locate`` returns.
"""

from __future__ import annotations

import argparse

from amp_graph.cli.capture_target import target_and_batch, users_code
from amp_graph.cli.terminal import Told
from amp_graph.numerics.overflow.locate import locate


def run(args: argparse.Namespace) -> Told:
    """Run the batch of TARGET, and tell what was found; status 0 where nothing was, and 3 where something was."""
    with users_code():
        target, batch, loss_fn = target_and_batch(args, "locate")
        found = locate(target.model, batch, loss_fn, policy=args.policy, scale=args.scale)
    return Told(found.to_dict(), [found.text().removesuffix("\n")], 3 if found else 0)
