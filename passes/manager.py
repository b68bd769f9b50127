"""Run passes in order: lint, recompile, verify, time, and wrap errors; the passes do none of it.

Before: ``gm``. After: ``Outcome(gm, results)``, one named result a pass.
"""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from amp_graph.lists import AmpGraphError
from amp_graph.passes import facts
from amp_graph.passes.base import Pass, PassError, PassResult, Writes
from amp_graph.passes.text import target_text
from amp_graph.passes.verify import Checked, Contract, verify

VERIFY = "AMP_GRAPH_VERIFY"


@dataclass(frozen=True)
class Timed:
    """What one pass did, and the seconds it took."""

    name: str
    result: PassResult
    seconds: float


def run_passes(gm: GraphModule, passes: Sequence[Pass], *, checked: bool | None = None) -> tuple[Timed, ...]:
    """Run ``passes`` over ``gm`` in place and return what each did.

    ``checked``: verify the contract after each pass; None asks the environment variable AMP_GRAPH_VERIFY.
    Raises PassError (a pass failed) or VerifyError (a pass broke the contract); both name the pass.
    """
    checked = is_verifying() if checked is None else checked
    done = []
    contracts: dict[Writes, Contract] = {}  # of the graph as it is
    right: Checked = {}
    for one in passes:
        if checked and one.writes not in contracts:
            contracts[one.writes] = Contract.of(gm, one.writes)
        start = time.perf_counter()
        result = _guarded(one, gm)
        seconds = time.perf_counter() - start
        if result.modified:
            result.gm.graph.lint()
        if checked and result.modified:
            try:
                contracts = {one.writes: verify(gm, contracts[one.writes], one, right)}
            except AmpGraphError as error:
                raise type(error)(f"after pass {one.name}: {error}") from error
        done.append(Timed(one.name, result, seconds))
    gm.recompile()
    return tuple(done)


def is_verifying() -> bool:
    """Say whether the environment variable AMP_GRAPH_VERIFY asks for every check there is."""
    return os.environ.get(VERIFY, "") not in ("", "0")


def _guarded(one: Pass, gm: GraphModule) -> PassResult:
    try:
        with warnings.catch_warnings():  # what kernels say of fake operands; real ones say it again
            warnings.simplefilter("ignore")
            return one.run(gm)
    except AmpGraphError:
        raise
    except Exception as error:
        raise PassError(f"pass {one.name} failed: {type(error).__name__}: {error}{_at_node(error)}") from error


def _at_node(error: Exception) -> str:
    """Return the node that a pass was at when ``error`` came up, and the user's line, from the traceback."""
    nodes = [f.f_locals.get("node") for f, _ in traceback.walk_tb(error.__traceback__)]
    node = next((n for n in reversed(nodes) if isinstance(n, Node)), None)
    if node is None:
        return ""
    where = facts.source_line(node)
    return f"\n  at {node.name} = {target_text(node)}" + (f"\n  {where}" if where else "")
