"""One captured graph of a comparison: its forms, the values of fp64 that others are compared with, and what was found.

Before: ``Variants``, a graph in four precisions. After: ``graph.sink(mode, ...)``, which takes the values of one run:
the first run in fp32 is compared with the first one in fp64, the second with the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from amp_graph.numerics.differences import Against, Differences, Reference
from amp_graph.numerics.variants import FP64, MODES, Variants
from amp_graph.passes.calibration.node_keys import node_keys


@dataclass(eq=False)
class ComparedGraph:
    """One captured graph, or one inside of another: its forms, and what was found of it.

    ``outputs``: those that leave the captured graph. ``refs``: a reference for each run of a batch; ``runs``: how many
    there were in the mode of the moment. ``bodies``: what runs the graphs inside it.
    """

    forms: Variants
    keys: dict[Node, str]
    written: frozenset[str]
    outputs: tuple[str, ...]
    refs: list[Reference] = field(default_factory=list)
    runs: int = 0
    bodies: dict[str, Callable[..., Any]] = field(default_factory=dict)
    found: dict[str, Differences] = field(default_factory=lambda: {mode: Differences() for mode in MODES[1:]})

    @classmethod
    def of(cls, forms: Variants) -> ComparedGraph:
        """Return the graph of ``forms``, without what runs the graphs inside it."""
        graph = forms.prepared.graph
        written = frozenset(n.name for n in graph.nodes if forms.memory.is_written(n))
        outputs = tuple(n.name for n in graph.output_node().all_input_nodes) if forms.is_whole else ()
        return cls(forms, node_keys(forms.prepared), written, outputs)

    def sink(self, mode: str, scale: float, unit: float) -> Reference | Against:
        """Return what takes the next run: its reference, or what compares it; a run that fp64 has not made is alone."""
        if mode == FP64:
            self.refs.append(Reference(self.written))
            return self.refs[-1]
        ref = self.refs[self.runs] if self.runs < len(self.refs) else Reference()
        self.runs += 1
        return Against(ref, self.found[mode], scale, unit)
