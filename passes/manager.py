"""Run passes in order: lint, recompile, verify, time; skip and report a pass that fails.

Before: ``gm``. After: ``gm`` rewritten, and one ``Timed`` per pass, with its changes or the reason for its failure.
"""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from amp_graph.lists import AmpGraphError, ListError, warn
from amp_graph.lists.errors import Attempt, Undo
from amp_graph.passes.base import Pass, PassError, PassResult, VerifyError, Writes
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.graph_snapshot import snapshot
from amp_graph.passes.graph.graph_text import target_text
from amp_graph.passes.verify import Checked, Contract, verify

VERIFY = "AMP_GRAPH_VERIFY"
STRICT = "AMP_GRAPH_STRICT"
REPORT_IT = (
    "  fix:   none is needed, results are right; please report it with the text of amp_graph.report(model).graphs"
)


@dataclass(frozen=True)
class Timed:
    """The result of one pass, and its time in seconds; ``failure``: why it was skipped for this graph, or ""."""

    name: str
    result: PassResult
    seconds: float
    failure: str = ""


def run_passes(
    gm: GraphModule,
    passes: Sequence[Pass],
    *,
    checked: bool | None = None,
    strict: bool | None = None,
) -> tuple[Timed, ...]:
    """Run ``passes`` over ``gm`` in place and return the result of each.

    A pass that raises, or that breaks the contract, is skipped for this graph: the graph is restored, the other passes
    run again and are all verified, and a warning and the pass's ``Timed`` report the failure.

    ``checked``: verify the contract after each pass; None reads the environment variable AMP_GRAPH_VERIFY.
    ``strict``: raise if a pass fails; None reads AMP_GRAPH_STRICT.

    Raises PassError or VerifyError, which name the pass, if strict or if the pass is ``required``; ``gm`` is then
    unchanged. ListError and PolicyError are not wrapped, as they report errors in the user's input.
    """
    checked = os.environ.get(VERIFY, "") not in ("", "0") if checked is None else checked
    strict = is_strict() if strict is None else strict
    restore = snapshot(gm)
    failed: dict[int, AmpGraphError] = {}
    with Undo(restore):
        while len(done := _run(gm, passes, failed, checked or bool(failed))) < len(passes):
            one, error = passes[len(done)], failed[len(done)]
            if strict or one.required:
                raise error from error.__cause__
            restore()
            warn(f"amp_graph: the pass {one.name} is left out of a graph: {error}\n{REPORT_IT}")
    gm.recompile()
    return done


def _run(gm: GraphModule, passes: Sequence[Pass], failed: dict[int, AmpGraphError], checked: bool) -> tuple[Timed, ...]:
    """Run all passes except those that ``failed``, up to the first that fails now, and add that to them."""
    done: list[Timed] = []
    contracts: dict[Writes, Contract] = {}  # of the current graph
    right: Checked = {}
    for i, one in enumerate(passes):
        if i in failed:
            done.append(Timed(one.name, PassResult(gm), 0.0, str(failed[i])))
            continue
        with Attempt(ListError) as tried:  # a pass may raise anything
            if checked and one.writes not in contracts:
                contracts[one.writes] = Contract.of(gm, one.writes)
            start = time.perf_counter()
            with warnings.catch_warnings():  # kernels warn about fake operands; they warn again for real ones
                warnings.simplefilter("ignore")
                result = one.run(gm)
            seconds = time.perf_counter() - start
            if result.modified:
                result.gm.graph.lint()
            if contracts and result.modified:
                contracts = {one.writes: verify(gm, contracts[one.writes], one, right)}
        if tried.error is not None:
            failed[i] = _wrapped(one, tried.error)
            break
        done.append(Timed(one.name, result, seconds))
    return tuple(done)


def is_strict() -> bool:
    """Say whether the environment variable AMP_GRAPH_STRICT turns a failed pass into an error."""
    return os.environ.get(STRICT, "") not in ("", "0")


def _wrapped(one: Pass, error: Exception) -> AmpGraphError:
    """Wrap ``error`` in an error that names the pass, the node and the user's line."""
    if isinstance(error, VerifyError):
        told: AmpGraphError = VerifyError(f"after pass {one.name}: {error}")
    elif isinstance(error, PassError):
        told = error if one.name in str(error) else PassError(f"pass {one.name} failed: {error}")
    else:
        told = PassError(f"pass {one.name} failed: {type(error).__name__}: {error}{_at_node(error)}")
    if told is not error:
        told.__cause__ = error
    return told


def _at_node(error: Exception) -> str:
    """Return the node that a pass was visiting when ``error`` was raised, and the user's line, from the traceback."""
    nodes = [f.f_locals.get("node") for f, _ in traceback.walk_tb(error.__traceback__)]
    node = next((n for n in reversed(nodes) if isinstance(n, Node)), None)
    return "" if node is None else f"\n  at {node.name} = {target_text(node)}{node_info.at_line(node)}"
