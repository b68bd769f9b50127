"""How graphs of torch.export are known, and how programs are compiled. Private names, checked on torch 2.11 - 2.13."""

from __future__ import annotations

from torch._inductor import aoti_compile_and_package
from torch.export import ExportedProgram
from torch.fx import GraphModule

CONSTRAINTS = "inline_constraints"  # of graph_module.meta; torch.export sets it for every graph that it makes


def is_exported(gm: GraphModule) -> bool:
    """Say whether torch.export made ``gm``, such as ``exported.module()``, or the graph that it is a copy of."""
    return CONSTRAINTS in gm.meta


def compile_package(program: ExportedProgram, path: str) -> str:
    """Compile ``program`` by AOTInductor into the package ``path``; return its path."""
    return str(aoti_compile_and_package(program, package_path=path))
