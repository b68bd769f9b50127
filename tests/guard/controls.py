"""Controls: what a kernel that is wrong does, of which each has to be found, and one that is right."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

import torch

from amp_graph.passes.native.jit_compiler import load
from tests.guard.case import Case, drawn, equal

SOURCE = Path(__file__).with_name("broken.c")
COUNT = 18
# How the kernel is wrong, as the enum of broken.c has it; and where the guard page is that shows it.
CONTROLS = {
    "right, at the end": (0, "end"),
    "right, at the begin": (0, "begin"),
    "reads behind its input": (1, "end"),
    "writes behind its output": (2, "end"),
    "reads before its input": (3, "begin"),
    "leaves the last number": (4, "end"),
    "writes behind its scratch": (5, "end"),
    "reads scratch that it has not written": (6, "begin"),
}


def _call(how: int) -> None:
    kernel = load(SOURCE).add_one
    kernel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    x = drawn(COUNT, dtype=torch.float32)
    made = torch.empty_like(x)
    kernel(x.data_ptr(), made.data_ptr(), COUNT, how)
    equal(made, x + 1)


def controls() -> list[tuple[Case, str, bool]]:
    """Return each as a case, with the place of its guard page, and whether it is wrong."""
    return [
        (Case(f"control: {name}", partial(_call, how), False, True), place, how > 0)
        for name, (how, place) in CONTROLS.items()
    ]
