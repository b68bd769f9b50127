"""``amp-graph passes``: prints the table of all passes, in order: which are on, and why others are off."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from amp_graph.cli.pass_states import Mode, State, states
from amp_graph.cli.terminal import write_lines, write_table
from amp_graph.passes.pipeline_skips import GROUPS
from amp_graph.policy import Policy

DIM = "dim"
COLUMNS = ("pass", "stage", "phase", "exactness", "state", "law")


def run(args: argparse.Namespace) -> int:
    """Print the table for one policy, device and mode."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy, mode = Policy.parse(args.policy), Mode(args.step, args.compile, args.gradients)
    found = states(policy, device, mode)
    if args.format == "json":
        print(json.dumps(as_dict(policy, device, mode, found), indent=2))
        return 0
    on = sum(1 for state in found if state.phase is not None)
    head = f"# policy {policy}, {device}, {mode}: {on} of {len(found)} passes are on"
    write_lines([(head, "bold")], sys.stdout)
    write_table(COLUMNS, [(_cells(state), "" if state.phase else DIM) for state in found], sys.stdout)
    words = ", ".join(f"{word} ({len(names)})" for word, names in GROUPS.items())
    write_lines([("", ""), (f"# skip= takes the names of optional passes, and groups: {words}", DIM)], sys.stdout)
    return 0


def as_dict(policy: Policy, device: str, mode: Mode, found: list[State]) -> dict[str, object]:
    """Return the table as plain values: the policy, the device, the mode, the groups of ``skip=``, the passes."""
    modes = {"step": mode.step, "compile": mode.compile, "gradients": mode.gradients}
    groups = {word: list(names) for word, names in GROUPS.items()}
    told = [state.to_dict() for state in found]
    return {"policy": str(policy), "device": device, "mode": modes, "groups": groups, "passes": told}


def _cells(state: State) -> tuple[str, ...]:
    row = state.row
    phases = ", ".join(phase.value for phase in row.phases)
    told = ("on" if row.skippable else "on (not optional)") if state.phase else f"off: {state.why}"
    return row.name, row.stage.value, phases, row.grade.word, told, row.law
