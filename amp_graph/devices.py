"""Finds the device that a graph or a model computes on, and the name of the machine.

Before: a graph whose values are on "cpu" and "cuda". After: "cuda".
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.precision.machine_rates import class_of


def machine_name(device: str) -> str:
    """Return what a measurement on ``device`` ("cpu", "cuda") holds for: the GPU by its name, a CPU by its class."""
    return torch.cuda.get_device_name() if device == "cuda" else class_of("cpu").name


def device_of(gm: GraphModule) -> str:
    """Return the type of the device that the graph computes on: the first that is not the CPU, else "cpu"."""
    found = {t.device.type for n in gm.graph.nodes for t in tensors(value(n))}
    return next(iter(sorted(found - {"cpu", "meta"})), "cpu")


def device_of_model(model: torch.nn.Module) -> str | None:
    """Return the type of the first device but the CPU that holds a parameter; None if all are on the CPU."""
    found = {p.device.type for p in model.parameters()}
    return next(iter(sorted(found - {"cpu"})), None)
