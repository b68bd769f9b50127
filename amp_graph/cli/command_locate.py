"""``amp-graph locate``: names the operation that makes the first infinity or NaN of a model's batch.

Before: TARGET, with a batch of inputs. After: what ``amp_graph.locate`` returns.
"""

from __future__ import annotations

import argparse

from amp_graph.cli.capture_target import any_loss, users_code
from amp_graph.cli.target import load_target
from amp_graph.cli.terminal import write_json
from amp_graph.numerics.overflow.locate import locate


def run(args: argparse.Namespace) -> int:
    """Run the inputs of TARGET and print what was found; status 0 where nothing was, and 3 where something was."""
    with users_code():
        target = load_target(args.target, args.input)
        target.model.train(args.training is not False)
        inputs = target.named_inputs() if target.kwargs else target.args
        found = locate(target.model, (inputs,), any_loss, policy=args.policy, scale=args.scale)
    if args.json:
        write_json(found.to_dict())
    else:
        print(found.text(), end="")
    return 3 if found else 0
