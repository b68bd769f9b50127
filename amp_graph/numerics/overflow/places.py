"""Where a call stands: the node of a captured graph, or the module and line of code that is not captured.

``Located(node="linear_3", operation="linear", module="blocks.1.fc", line="model.py:12, in forward: ...", ...)``.
"""

from __future__ import annotations

import linecache
import os
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph import errors, passes
from amp_graph.numerics.exact_runs import OUTSIDE
from amp_graph.numerics.overflow.result import Located
from amp_graph.passes.graph.bodies import OPERATORS, is_run_as_python
from amp_graph.passes.graph.graph_text import target_text
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST, INPUT
from amp_graph.passes.graph.node_info import module_path, source_line
from amp_graph.passes.graph.observe import Observer, RunningNode
from amp_graph.passes.torch_compat.autograd import next_sequence_number, running_sequence_number

HERE, *OTHERS = (os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (errors, torch, passes))
RUNS = "amp_graph_compute"  # the function of ours that runs code which is not captured
CodePlace = tuple[str, str, int, str]  # module, file, line, function


class GraphPlaces(RunningNode):
    """Runs rewritten graphs node by node, and knows which node a call belongs to.

    The bodies of branches, loops and activation checkpoints run node by node, too, these also when backward runs them
    again.
    """

    def observed(self, gm: GraphModule) -> Callable[..., Any]:
        """Return what runs ``gm``, whose inner graphs run under it from now on."""
        run = Observer(gm, self).run
        for part in gm.modules():
            if isinstance(part, GraphModule) and part is not gm:
                part.forward = Observer(part, self).run
        return run

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Run an operator over graphs as Python, as a dispatch mode does not see what runs inside of it."""
        return (OPERATORS[target.__name__], args, {}) if is_run_as_python(target, args) else (target, args, kwargs)

    def told(self, place: Node | None, source: Node | None, *, backward: bool) -> Located:
        """Return the place of a call of a node; ``source``: whose call computed the value, where ``place`` casts it."""
        if place is None:
            return Located() if source is None else place_of(source)
        if not backward or source is None or source is place:
            return place_of(place)
        # The gradient that a cast gets was computed by the backward of what read its result; what made the value that
        # it casts gets the rounded one.
        makes = value_of(place)
        of, keep = place_of(source), place_of(place).keep if makes.op in OUTSIDE else _kept(makes)
        return replace(of, node=place.name, cast_of=f"the gradient that {of.operation} passes on", keep=keep)


def place_of(node: Node) -> Located:
    """Return the place of a node; that of a cast is where its value was computed, or of a weight's cast its reader."""
    source, reader = value_of(node), node
    while CAST in reader.meta and reader.users:
        reader = next(iter(reader.users))
    computed = source.op not in OUTSIDE
    told = source if computed and users_line_of(source) else reader
    cast_of = ""
    if source is not node:
        cast_of = target_text(source) if computed else str(source.meta.get(INPUT, source.target))
    return Located(
        node=node.name,
        operation=target_text(told if computed or source is node else reader),
        module=module_path(told),
        line=users_line_of(told),
        cast_of=cast_of,
        keep=_kept(reader),
    )


def _kept(node: Node) -> tuple[str, str]:
    """Return the module of ``node``, and the name under which a policy knows its operation, if that is one."""
    names = names_of(node)
    return module_path(node), names[0] if len(names) == 1 else ""


def value_of(node: Node) -> Node:
    """Return the node whose value ``node`` casts; itself for what is no cast."""
    while CAST in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def users_line_of(node: Node) -> str:
    """Return the line that made ``node``, without lines of torch and of ours."""
    line = source_line(node)
    return "" if line.startswith((HERE, *OTHERS)) else line


class CodePlaces:
    """Knows where code that is not captured stands: the module whose forward runs, and the user's line."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Prepare for a run of ``model``."""
        self._names = {id(m): name for name, m in model.named_modules()}
        self._numbers: list[int] = []
        self._places: list[CodePlace] = []

    def seen(self) -> None:
        """Note the place of an operator of the forward, so that its backward can be told."""
        self._numbers.append(next_sequence_number())
        self._places.append(self._running())

    def _running(self) -> CodePlace:
        """Return the innermost module that runs, and file, line and function that are neither torch's nor ours."""
        module, line, call = None, None, torch.nn.Module.__call__.__code__
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (module is None or line is None):
            code = frame.f_code
            if code.co_name == RUNS and code.co_filename.startswith(HERE):
                break
            if code is call and module is None:
                module = self._names.get(id(frame.f_locals["self"]))
            if line is None and not code.co_filename.startswith((HERE, *OTHERS, "<")):
                line = code.co_filename, frame.f_lineno, code.co_name
            frame = frame.f_back
        return module or "", *(line or ("", 0, ""))

    def now(self, *, backward: bool) -> CodePlace:
        """Return the place of the call that runs now."""
        # An operator runs after its node of autograd's graph was numbered.
        at = bisect_left(self._numbers, running_sequence_number() + 1) if backward else len(self._places)
        return self._places[min(at, len(self._places) - 1)] if self._places else ("", "", 0, "")

    def told(self, place: CodePlace, source: CodePlace | None, *, backward: bool) -> Located:
        """Return a place in words; that of a cast is where its value was computed."""
        module, file, number, name = source or place
        line = f"{file}:{number}, in {name}: {linecache.getline(file, number).strip()}" if file else ""
        is_cast = source not in (None, place)
        return Located(module=module, line=line, cast_of="a value" * is_cast, keep=(place[0], ""))
