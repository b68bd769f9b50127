"""Builds of compiled C, and places of the guard page: how all cases are run once.

Before: C as this CPU gets it. After, by ``prepare(variant, called)`` in a child: as other CPUs get it, with its scratch
between guard pages, threads for the least work, and what is called noted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amp_graph.passes.backends.cpu.attention import attention_kernel
from amp_graph.passes.backends.cpu.linear import amx_gemm, panel_gemm
from amp_graph.passes.backends.recurrent import lstm_kernel
from amp_graph.passes.native import jit_compiler, kernel_table
from tests.guard.memory import PLACES

HERE = Path(__file__).parent
TILES = HERE.parent / "passes" / "emulated_tiles.h"
INCLUDED = HERE / "guarded_memory.h"
BUILDS = ("as torch", "AVX2", "DEFAULT", "emulated units", "dot products")


@dataclass(frozen=True)
class Variant:
    """How all cases are run once."""

    build: str
    place: str
    threads: int
    guards_scratch: bool = True

    @property
    def name(self) -> str:
        """The variant in words."""
        return f"{self.build}, {self.threads} thread(s), guard page at the {self.place}"


def variants() -> list[Variant]:
    """Return those of the whole run."""
    found = [Variant(build, place, 1) for build in BUILDS for place in PLACES]
    return [*found, Variant("as torch", "end", 3), Variant("emulated units", "begin", 3)]


def prepare(variant: Variant, called: set[tuple[str, str]]) -> None:
    """Have C compiled as ``variant`` says, threads for little work, and what is called noted."""
    os.environ["AMP_GRAPH_GUARD"] = variant.place
    torch.set_num_threads(variant.threads)
    jit_compiler.LEAST_OF_A_THREAD = 1
    if variant.guards_scratch:
        version = f"-DGUARDED=0x{hashlib.sha256(INCLUDED.read_bytes()).hexdigest()[:8]}"
        jit_compiler.FLAGS = (*jit_compiler.FLAGS, "-include", str(INCLUDED), version)
    if variant.build in ("AVX2", "DEFAULT"):
        capability = variant.build
        torch.backends.cpu.get_cpu_capability = lambda: capability
    if variant.build == "emulated units":
        version = f"-DEMULATED=0x{hashlib.sha256(TILES.read_bytes()).hexdigest()[:8]}"
        flags = (*kernel_table.DOT_PRODUCTS, "-DMATRIX_UNITS", "-include", str(TILES), version)
        _tiled(lambda source, part=(): jit_compiler.load(source, (*flags, *part)))
        amx_gemm.built = lambda source, *_: jit_compiler.load(source, flags)
    if variant.build == "dot products":
        _tiled(lambda source, part=(): kernel_table.built(source, part=part))
    _note_calls(called)


def _tiled(best: Callable[..., Any]) -> None:
    for module in (panel_gemm, lstm_kernel, attention_kernel):
        module.best = best  # type: ignore[attr-defined]


def _note_calls(called: set[tuple[str, str]]) -> None:
    sharing = jit_compiler._sharing_threads

    def noting(found: Any) -> Any:
        source = Path(found._name).name.rpartition("-")[0]

        class Function(found._FuncPtr):  # type: ignore[misc]
            _flags_, _restype_ = found._FuncPtr._flags_, found._FuncPtr._restype_

            def __call__(self, *given: Any) -> Any:
                called.add((source, self.__name__))
                return super().__call__(*given)

        found._FuncPtr = Function
        return sharing(found)

    jit_compiler._sharing_threads = noting
