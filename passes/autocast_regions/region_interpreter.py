"""Run a graph node by node that may open autocast regions of its own, and leave them if it raises.

``with RegionInterpreter(gm) as run: run.run(*inputs)``.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.amp.autocast_mode import _enter_autocast, _exit_autocast  # 2.11 to 2.13
from torch.fx import Interpreter

Own = TypeVar("Own", bound="RegionInterpreter")


class RegionInterpreter(Interpreter):
    """An interpreter that leaves the autocast regions that it entered: by a node of the graph, or at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.fx.Interpreter`` takes."""
        super().__init__(*args, **kwargs)
        self.entered: list[Any] = []

    def __enter__(self: Own) -> Own:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the regions that are open."""
        for region in reversed(self.entered):
            _exit_autocast(region)

    def run(self, *args: Any, **_: Any) -> Any:
        """Run all nodes; torch's ``run`` starts a thread of tqdm, which stays in the process."""
        self.env, self.args_iter = {}, iter(self.graph.process_inputs(*args))
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
        return self.env[node]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and track open regions."""
        result = super().call_function(target, args, kwargs)
        if target is _enter_autocast:
            self.entered.append(result)
        elif target is _exit_autocast:
            self.entered.remove(args[0])
        return result
