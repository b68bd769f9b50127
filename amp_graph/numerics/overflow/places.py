"""Where a call stands: the node of a captured graph, or the module and line of code that is not captured.

``Place("linear_3", "linear", "blocks.1.fc", "model.py:12, in forward: return self.fc(x)")``.
"""

from __future__ import annotations

import linecache
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph import errors, passes
from amp_graph.passes.graph.graph_text import target_text
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CAST, INPUT
from amp_graph.passes.graph.node_info import module_path, source_line
from amp_graph.passes.graph.observe import Observer, RunningNode
from amp_graph.passes.graph.run_bodies import OPERATORS, is_run_as_python
from amp_graph.passes.torch_compat.autograd import next_sequence_number, running_sequence_number

HERE, *OTHERS = (os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (errors, torch, passes))
RUNS = "amp_graph_compute"  # the function of ours that runs code which is not captured
INPUTS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Place:
    """``node``: its name in the captured graph. ``cast_of``: for a cast, its value.

    ``keep``: the module to keep in fp32, and the operation, for a node in no submodule. ``operation``: what the user
    calls. ``line``: the user's, as ``file.py:12, in forward: x = self.fc(x)``.
    """

    node: str = ""
    operation: str = ""
    module: str = ""
    line: str = ""
    cast_of: str = ""
    keep: tuple[str, str] = ("", "")


class GraphPlaces(RunningNode):
    """Runs a rewritten graph node by node, and knows which node a call belongs to.

    The bodies of branches, loops and activation checkpoints run node by node, too, these also when backward runs them
    again.
    """

    def __init__(self, gm: GraphModule) -> None:
        """Prepare a run of ``gm``, whose inner graphs run under it from now on."""
        super().__init__()
        self.run = Observer(gm, self).run
        for part in gm.modules():
            if isinstance(part, GraphModule) and part is not gm:
                part.forward = Observer(part, self).run

    def called(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Run an operator over graphs as Python, as a dispatch mode does not see what runs inside of it."""
        return (OPERATORS[target.__name__], args, {}) if is_run_as_python(target, args) else (target, args, kwargs)


def place_in_graph(node: Node | None, source: Node | None, backward: bool) -> Place:
    """Return the place of a call of ``node``; ``source``: whose call computed the value, where ``node`` casts it."""
    if node is None:
        return Place() if source is None else place_of(source)
    if not backward or source is None or source is node:
        return place_of(node)
    # The gradient that a cast gets was computed by the backward of what read its result; what made the value that it
    # casts gets the rounded one.
    of, behind = place_of(source), place_of(node)
    makes = value_of(node)
    keep = behind.keep if makes.op in INPUTS else _kept(makes)
    return Place(node.name, of.operation, of.module, of.line, f"the gradient that {of.operation} passes on", keep)


def place_of(node: Node) -> Place:
    """Return the place of a node; that of a cast is where its value was computed, or of a weight's cast its reader."""
    source, reader = value_of(node), node
    while is_cast(reader) and reader.users:
        reader = next(iter(reader.users))
    computed = source.op not in INPUTS
    told = source if computed and users_line_of(source) else reader
    cast_of = ""
    if source is not node:
        cast_of = target_text(source) if computed else str(source.meta.get(INPUT, source.target))
    operation = target_text(told if computed or source is node else reader)
    return Place(node.name, operation, module_path(told), users_line_of(told), cast_of, _kept(reader))


def _kept(node: Node) -> tuple[str, str]:
    """Return the module of ``node``, and the name under which a policy knows its operation, if that is one."""
    names = names_of(node)
    return module_path(node), names[0] if len(names) == 1 else ""


def value_of(node: Node) -> Node:
    """Return the node whose value ``node`` casts; itself for what is no cast."""
    while is_cast(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def users_line_of(node: Node) -> str:
    """Return the line that made ``node``, without lines of torch and of ours."""
    line = source_line(node)
    return "" if line.startswith((HERE, *OTHERS)) else line


def is_cast(node: Node) -> bool:
    """Say whether ``node`` is a cast that was inserted."""
    return CAST in node.meta


class CodePlaces:
    """Knows where code that is not captured stands: the module whose forward runs, and the user's line."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Prepare for a run of ``model``."""
        self._names = {id(m): name for name, m in model.named_modules()}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._told: list[tuple[str, tuple[str, int, str]]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> CodePlaces:
        """Follow the calls of modules."""
        before = torch.nn.modules.module.register_module_forward_pre_hook
        after = torch.nn.modules.module.register_module_forward_hook
        self._hooks = [before(self._enter), after(self._leave, always_call=True)]
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop that."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._stack:
            self._stack.pop()

    def seen(self) -> None:
        """Note the place of an operator of the forward, so that its backward can be told."""
        self._numbers.append(next_sequence_number())
        self._told.append((self._stack[-1] if self._stack else "", users_line()))

    def now(self, backward: bool) -> tuple[str, tuple[str, int, str]]:
        """Return the module and the line of the call that runs now."""
        if not self._told:
            return "", ("", 0, "")
        # An operator runs after its node of autograd's graph was numbered.
        at = bisect_left(self._numbers, running_sequence_number() + 1) if backward else len(self._told) - 1
        return self._told[min(at, len(self._told) - 1)]


def place_in_code(own: tuple[str, tuple[str, int, str]] | None, source: Any, backward: bool) -> Place:
    """Return the place of a call in code that is not captured; that of a cast is where its value was computed."""
    if own is None:  # a given value
        return Place()
    module, (file, number, name) = source or own
    code = linecache.getline(file, number).strip()
    line = f"{file}:{number}, in {name}: {code}" if file else ""
    return Place("", "", module, line, "a value" if source not in (None, own) else "", (own[0], ""))


def users_line() -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame of the run that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == RUNS and frame.f_code.co_filename.startswith(HERE)):
        file = frame.f_code.co_filename
        if not file.startswith((HERE, *OTHERS, "<")):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0, ""
