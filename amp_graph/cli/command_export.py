"""``amp-graph export``: writes a model in mixed precision for programs that do not have amp_graph.

Before: TARGET, a model with example inputs. After: a file, and a summary of its casts and weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
from torch.export import ExportedProgram

from amp_graph.cli.capture_target import plain_target, users_code
from amp_graph.cli.terminal import write_json
from amp_graph.convert import warn_of_unmatched
from amp_graph.errors import AmpGraphError
from amp_graph.export import export, to_aoti, to_onnx
from amp_graph.export.formats import save
from amp_graph.passes.casts.portable_ops import CAST_OP
from amp_graph.policy import Policy

LOADS = {
    "pt2": "torch.export.load({!r}).module()",
    "onnx": "onnxruntime.InferenceSession({!r})",
    "aoti": "torch._inductor.aoti_load_package({!r})",
}


def run(args: argparse.Namespace) -> int:
    """Export TARGET and print what was written."""
    if args.opset is not None and args.to != "onnx":
        raise AmpGraphError(
            f"export: --opset {args.opset} is of ONNX, and --to is {args.to}\n  legal: --opset with --to onnx\n"
            f"  fix:   amp-graph export {args.target} --to onnx --opset {args.opset} --output model.onnx"
        )
    with users_code():
        target = plain_target(args)
        warn_of_unmatched(target.model, target.policy)
        target.model.train(bool(args.training))
        fold = args.fold_weights
        program = export(target.model, target.args, target.kwargs, target.policy, fold_weights=fold)
        _write(program, args)
    told = _summary(program, target.policy, args)
    if args.json:
        write_json(told, sys.stdout)
        return 0
    print(f"{args.output}: {told['bytes'] // 1024} KiB, {args.to}, {told['policy']}, {told['casts']} casts")
    print(f"weights: {', '.join(f'{count} in {dtype}' for dtype, count in told['weights'].items()) or 'none'}")
    print(f"load it with {told['load']}")
    return 0


def _write(program: ExportedProgram, args: argparse.Namespace) -> None:
    if args.to == "onnx":
        to_onnx(program, args.output, args.opset)
    elif args.to == "aoti":
        to_aoti(program, args.output)
    else:
        save(program, args.output)


def _summary(program: ExportedProgram, policy: Policy, args: argparse.Namespace) -> dict[str, Any]:
    weights: dict[str, int] = {}
    for tensor in program.state_dict.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            name = str(tensor.dtype).removeprefix("torch.")
            weights[name] = weights.get(name, 0) + 1
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return {
        "output": args.output, "format": args.to, "policy": str(policy), "bytes": os.path.getsize(args.output),
        "operators": len(nodes), "casts": sum(node.target is CAST_OP for node in nodes), "weights": weights,
        "load": LOADS[args.to].format(args.output),
    }  # fmt: skip
