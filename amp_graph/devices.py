"""Finds the device that a graph or a model computes on.

Before: a graph whose values are on "cpu" and "cuda". After: "cuda".
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from amp_graph.passes.graph.fake_values import tensors, value


def device_of(gm: GraphModule) -> str:
    """Return the type of the device that the graph computes on: the first that is not the CPU, else "cpu"."""
    found = {t.device.type for n in gm.graph.nodes for t in tensors(value(n))}
    return next(iter(sorted(found - {"cpu", "meta"})), "cpu")


def device_of_model(model: torch.nn.Module) -> str | None:
    """Return the type of the first device but the CPU that holds a parameter; None if all are on the CPU."""
    found = {p.device.type for p in model.parameters()}
    return next(iter(sorted(found - {"cpu"})), None)
