"""``amp-graph export``: writes a model in mixed precision for programs that do not have amp_graph.

Before: TARGET, a model with example inputs. After: a file, and a summary of its casts and weights.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

import torch

from amp_graph.cli.capture_target import plain_target, users_code
from amp_graph.cli.terminal import Told
from amp_graph.convert import warn_of_unmatched
from amp_graph.export import export, to_onnx
from amp_graph.export.formats import refuse_unwritable
from amp_graph.passes.casts.portable_ops import CAST_OP

LOADS = {"pt2": "torch.export.load({!r}).module()", "onnx": "onnxruntime.InferenceSession({!r})"}


def run(args: argparse.Namespace) -> Told:
    """Export TARGET, and tell what was written."""
    refuse_unwritable(args.output)  # before anything runs
    with users_code():
        target = plain_target(args)
        warn_of_unmatched(target.model, target.policy)
        target.model.train(bool(args.training))
        program = export(target.model, target.args, target.kwargs, target.policy, fold_weights=args.fold_weights)
        if args.to == "onnx":
            to_onnx(program, args.output, args.opset)
        else:
            torch.export.save(program, args.output)
    weights = [t for t in program.state_dict.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    told = {
        "output": args.output, "format": args.to, "policy": str(target.policy), "bytes": os.path.getsize(args.output),
        "casts": sum(node.target is CAST_OP for node in program.graph.nodes),
        "weights": dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in weights)),
        "load": LOADS[args.to].format(args.output),
    }  # fmt: skip
    return Told(told, (f"{key:8} {value}" for key, value in told.items()))
