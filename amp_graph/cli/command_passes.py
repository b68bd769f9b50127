"""``amp-graph passes``: prints the table of all passes, in order: which are on, and why others are off.

``states(Policy.parse("bf16,skip=attention"), "cpu", Mode())`` has a ``State(row, None, "skip=attention ...")``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_graph.cli.terminal import write_lines, write_table
from amp_graph.passes.pipeline import GROUPS, why_off
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import Phase, Row
from amp_graph.policy import Policy
from amp_graph.step.step_table import EVERY

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


# -- which passes are on, and why others are off ------------------------------------------------------


# The keys of ``State.to_dict``, and their meaning.
KEYS = {
    "name": "the name of the pass",
    "stage": "its subject",
    "phases": "the kinds of graphs that it runs on, see below",
    "devices": "the devices on which it runs",
    "conditions": "what must hold for it to be on",
    "joins": "passes without which it is off",
    "after": "passes that must come before it",
    "before": "passes that must come after it",
    "law": "what it replaces with what, and when",
    "exactness": "`bit-exact`, `rounding-equal`, or `approximate` with the bound in parentheses",
    "worth": "what it is needed for besides speed and memory; null if it is there for those alone",
    "backend": "whether only one device or compiler needs it",
    "required": "whether its failure leaves a graph unconverted; else the pass is skipped for that graph",
    "skip": "the word of `skip=` that disables this pass alone; null if there is none",
    "on": "whether it is on",
    "phase": "the first of its phases in which it is on; null if it is off",
    "why": "why it is off; empty if it is on",
}


@dataclass(frozen=True)
class Mode:
    """How a model runs: a call of it or a whole training step; eagerly or compiled; with gradients or without."""

    step: bool = False
    compile: str = "eager"
    gradients: bool = True

    def __str__(self) -> str:
        """Return ``training step, eager``."""
        return f"{'training step' if self.step else 'training' if self.gradients else 'inference'}, {self.compile}"


@dataclass(frozen=True)
class State:
    """A pass in the table; ``phase``: where it is on, or None; ``why``: the reason that it is off."""

    row: Row
    phase: Phase | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return all as plain values, by the names in ``KEYS``."""
        row = self.row
        values = (
            *(row.name, row.stage.value, [phase.value for phase in row.phases], list(row.devices)),
            *([need.word for need in row.needs], list(row.joins), list(row.all_after), list(row.all_before)),
            *(row.law, str(row.grade), row.worth, row.backend, row.cls.required, row.word if row.skippable else None),
            *(self.phase is not None, None if self.phase is None else self.phase.value, self.why),
        )
        return dict(zip(KEYS, values, strict=True))


def states(policy: Policy, device: str, mode: Mode) -> list[State]:
    """Return the state of every pass, in the order of the table."""
    with torch.set_grad_enabled(mode.gradients):
        options = policy.pipeline_options(
            device,
            eager=mode.compile == "eager",
            inductor={} if mode.compile == "inductor" else None,
            in_step=mode.step,
        )
    if policy.level == "O0":  # nothing is lowered, whatever dtype the policy names: no loss is scaled
        options = replace(options, dtype=torch.float32)
    return [_state(row, policy, options, mode) for row in EVERY]


def _state(row: Row, policy: Policy, options: PipelineOptions, mode: Mode) -> State:
    if row.name in options.skip:
        return State(row, None, f"skip={options.skip[row.name]} in the policy")
    found = [(phase, _phase_off(phase, policy, options.device, mode)) for phase in row.phases]
    running = [phase for phase, off in found if not off]
    if running and not {options.device, options.planned_for} & {*row.devices}:
        return State(row, None, f"device {options.device}: for {' and '.join(row.devices)} only")
    for phase in running:
        if not (why := why_off(row, phase, options)):
            return State(row, phase, "")
        return State(row, None, why)
    first, *others = dict.fromkeys(off for _, off in found)
    return State(row, None, ", or ".join([first, *(other.removeprefix("needs ") for other in others)]))


def _phase_off(phase: Phase, policy: Policy, device: str, mode: Mode) -> str:
    """Return why no graph of ``mode`` is in ``phase``; "" if one is."""
    compiler = mode.compile != "eager"
    if phase is Phase.JOINT:
        return "" if mode.step else "only in a training step"
    if policy.level == "O0" and phase not in (Phase.HANDOVER, Phase.INDUCTOR):
        return "level O0 runs the model unchanged"
    if phase is Phase.CALLS and mode.step:
        return "needs amp_graph.convert; a training step casts its weights inside its graph"
    if phase is Phase.CALLS:
        return "needs a graph that runs eagerly" if compiler else ""
    if phase is Phase.COMPILED:
        return "needs Inductor for a model on the CPU" if not compiler or device != "cpu" else ""
    if phase is Phase.STEP:
        return "" if mode.step and not compiler else "needs a training step that runs eagerly"
    if phase in (Phase.HANDOVER, Phase.INDUCTOR):
        return "" if compiler else "needs a compiler"
    return ""
