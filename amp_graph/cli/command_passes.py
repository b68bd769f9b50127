"""``amp-graph passes``: prints the table of all passes, in order: which are on, and why others are off.

``states(Policy.parse("bf16,skip=attention"), "cpu", Mode())`` has a ``State(row, None, "skip=attention ...")``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from amp_graph.cli.terminal import Told
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.pipeline_row import Phase, Row
from amp_graph.passes.pipeline_table import GROUPS, why_off
from amp_graph.policy import Policy
from amp_graph.step.step_table import EVERY

COLUMNS = ("pass", "stage", "phase", "exactness", "state", "law")


def run(args: argparse.Namespace) -> Told:
    """Return the table for one policy, device and mode."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy, mode = Policy.parse(args.policy), Mode(args.step, args.compile, args.gradients)
    found = states(policy, device, mode)
    rows = [_cells(state) for state in found]
    passes = [dict(zip(COLUMNS, cells, strict=True)) for cells in rows]
    data = {"policy": str(policy), "device": device, "mode": str(mode), "groups": GROUPS, "passes": passes}
    on = sum(1 for state in found if state.phase is not None)
    head = f"# policy {policy}, {device}, {mode}: {on} of {len(found)} passes are on"
    words = ", ".join(f"{word} ({len(names)})" for word, names in GROUPS.items())
    end = f"# skip= takes the names of optional passes, and groups: {words}"
    return Told(data, [head, *aligned([COLUMNS, *rows]), "", end])


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


def _cells(state: State) -> tuple[str, ...]:
    row = state.row
    phases = ", ".join(phase.value for phase in row.phases)
    told = ("on" if row.skippable else "on (not optional)") if state.phase else f"off: {state.why}"
    return row.name, row.stage.value, phases, row.grade.partition(" ")[0], told, row.law


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
    off = {phase: _phase_off(phase, policy, options.device, mode) for phase in row.phases}
    running = next((phase for phase in row.phases if not off[phase]), None)
    if running is None:
        first, *others = dict.fromkeys(off.values())
        return State(row, None, ", or ".join([first, *(other.removeprefix("needs ") for other in others)]))
    if not {options.device, options.planned_for} & {*row.devices}:
        return State(row, None, f"device {options.device}: for {' and '.join(row.devices)} only")
    why = why_off(row, running, options)
    return State(row, None if why else running, why)


def _phase_off(phase: Phase, policy: Policy, device: str, mode: Mode) -> str:
    """Return why no graph of ``mode`` is in ``phase``; "" if one is."""
    compiler = mode.compile != "eager"
    if policy.level == "O0" and phase not in (Phase.JOINT, Phase.HANDOVER, Phase.INDUCTOR):
        return "level O0 runs the model unchanged"
    in_step = "needs amp_graph.convert; a training step casts its weights inside its graph"
    needs = {
        Phase.JOINT: (mode.step, "only in a training step"),
        Phase.CALLS: (not mode.step and not compiler, in_step if mode.step else "needs a graph that runs eagerly"),
        Phase.COMPILED: (compiler and device == "cpu", "needs Inductor for a model on the CPU"),
        Phase.STEP: (mode.step and not compiler, "needs a training step that runs eagerly"),
        Phase.HANDOVER: (compiler, "needs a compiler"),
        Phase.INDUCTOR: (compiler, "needs a compiler"),
    }
    is_on, why = needs.get(phase, (True, ""))
    return "" if is_on else why
