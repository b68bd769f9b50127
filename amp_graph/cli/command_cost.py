"""``amp-graph cost``: the forward time of each family of operations, predicted and measured.

Before: a plan by rates. After: ``matmul bfloat16 12 operations: predicted 310 us, measured 342 us, ratio 0.91``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from amp_graph.cli.capture_target import captured
from amp_graph.cli.terminal import write_json, write_table
from amp_graph.devices import device_of
from amp_graph.passes.graph.fake_values import captured as captured_value
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import CAST, CLASSIFIED
from amp_graph.passes.precision.machine_rates import Machine, machine_for
from amp_graph.passes.precision.op_cost import cast_picoseconds, picoseconds, work_of

ROUNDS = 9
COLUMNS = ("operations", "dtype", "number", "predicted us", "measured us", "ratio")
OTHER = "other"  # families without a rate: measured, not predicted


@dataclass
class Row:
    """The operations of one family in one dtype, in microseconds."""

    count: int = 0
    predicted: float = 0.0
    measured: float = 0.0


def run(args: argparse.Namespace) -> int:
    """Capture TARGET, run each graph's forward several times, and print the table."""
    runs: list[tuple[GraphModule, tuple[Any, ...]]] = []
    captured(args.target, args.input, args.policy, args.training, compile=_keeping(runs))
    if args.json:
        write_json([_as_dict(gm, given) for gm, given in runs], sys.stdout)
        return 0
    for index, (gm, given) in enumerate(runs):
        machine = machine_for(device_of(gm))
        print(f"graph {index}: forward, planned for {machine.name} ({machine.description})")
        write_table(COLUMNS, [(row, "") for row in _cells(_rows(gm, given, machine))], sys.stdout)
    return 0


def _as_dict(gm: GraphModule, given: tuple[Any, ...]) -> dict[str, object]:
    """Return one graph's machine and rows; times are in microseconds."""
    machine = machine_for(device_of(gm))
    rows = [
        {"family": family, "dtype": dtype, **asdict(row)} for (family, dtype), row in _rows(gm, given, machine).items()
    ]
    return {"machine": machine.name, "operations": rows}


def _keeping(runs: list[tuple[GraphModule, tuple[Any, ...]]]) -> Callable[..., Callable[..., Any]]:
    """Return a backend that runs a graph eagerly, and keeps it with its inputs."""

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            runs.append((gm, tuple(t.detach().clone() if isinstance(t, torch.Tensor) else t for t in given)))
            return gm(*given)

        return run

    return backend


@dataclass
class _Stopwatch(Interpreter):
    """Runs a graph and records the time of each call: CPU time on a CPU, else wall time."""

    gm: GraphModule
    device: str
    taken: dict[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.gm)
        self.clock = time.process_time if self.device == "cpu" else self._synchronized

    @staticmethod
    def _synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def run_node(self, n: Node) -> Any:
        """Record the running node."""
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Time a function."""
        return self._timed(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Time a method."""
        return self._timed(super().call_method, target, args, kwargs)

    def _timed(self, call: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        start = self.clock()
        out = call(target, args, kwargs)
        taken = self.clock() - start
        self.taken[self.node] = min(taken, self.taken.get(self.node, taken))
        return out


def _rows(gm: GraphModule, given: tuple[Any, ...], machine: Machine) -> dict[tuple[str, str], Row]:
    """Return measured and predicted times by family and dtype; each operation's measured time is its minimum."""
    watch = _Stopwatch(gm, device_of(gm))
    for _ in range(ROUNDS):
        with torch.no_grad():
            watch.run(*(t.clone() if isinstance(t, torch.Tensor) else t for t in given))
    rows: dict[tuple[str, str], Row] = {}
    for node, taken in watch.taken.items():
        if is_part(node):
            continue
        family, dtype, predicted = _predicted(node, machine)
        row = rows.setdefault((family, dtype), Row())
        row.count += 1
        row.predicted += predicted / 1e6
        row.measured += taken * 1e6
    return rows


def _predicted(node: Node, machine: Machine) -> tuple[str, str, int]:
    """Return the family, the dtype and the predicted picoseconds of one node, forward only."""
    used = {str(t.dtype)[6:] for n in (node, *node.all_input_nodes) for t in tensors(value(n))}
    low = next((d for d in ("bfloat16", "float16") if d in used), "float32")
    if CAST in node.meta:
        source = node.args[0]
        assert isinstance(source, Node), "a cast has an input"
        return "cast", low, cast_picoseconds(source, machine, low)
    known = node.meta.get(CLASSIFIED)
    if known is None or not tensors(captured_value(node)):
        return OTHER, low, 0
    work = replace(work_of(node, known[2]), backward=0.0, sums=0)
    return work.family or "view", low, picoseconds(work, machine, low)


def _cells(rows: dict[tuple[str, str], Row]) -> list[tuple[str, ...]]:
    found = []
    for (family, dtype), row in sorted(rows.items(), key=lambda item: -item[1].measured):
        found.append((family, dtype, str(row.count), *_times(row.predicted, row.measured)))
    predicted, measured = (sum(getattr(row, name) for row in rows.values()) for name in ("predicted", "measured"))
    return [*found, ("all", "", str(sum(row.count for row in rows.values())), *_times(predicted, measured))]


def _times(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{predicted / measured:.2f}" if predicted and measured else "-"
    return f"{predicted:.1f}", f"{measured:.1f}", ratio
