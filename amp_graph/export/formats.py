"""Write an exported program in other formats: ONNX, and a package of AOTInductor.

Before: ``program``, of ``export``. After: ``model.onnx``, which onnxruntime runs, or ``model.pt2``, which
``torch._inductor.aoti_load_package`` runs; both without amp_graph.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import ExportedProgram

from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.export.onnx_types import refuse_missing_types
from amp_graph.passes.native.output_file import why_unwritable
from amp_graph.passes.torch_compat.inductor import compile_package

OLDEST_OPSET = 18  # that torch.onnx.export(dynamo=True) writes
NEEDS = ("onnx", "onnxscript")


def save(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write ``program`` as torch.export.load reads it. Raises AmpGraphError if the file cannot be written."""
    _refuse_path(path)
    torch.export.save(program, path)


def to_onnx(program: ExportedProgram, path: str | os.PathLike[str], opset: int | None = None) -> Any:
    """Write ``program`` to ``path`` as ONNX of version ``opset``; return torch's ``ONNXProgram``.

    opset: an operator set of the standard, by default that of torch.onnx.

    Raises AmpGraphError if a package is missing, if an operator of that version does not take a dtype of the program,
    if torch.onnx cannot write an operator, and if the file cannot be written; no file is written then.
    """
    for name in NEEDS:
        _refuse_without(name)
    if opset is not None and opset < OLDEST_OPSET:
        raise CaptureError(
            f"export: opset {opset} is older than those that torch.onnx writes from a program\n"
            f"  legal: {OLDEST_OPSET} and newer\n  fix:   opset={OLDEST_OPSET}"
        )
    _refuse_path(path)
    made = _onnx_program(program, opset)
    refuse_missing_types(made.model)
    made.save(os.fspath(path))
    return made


def to_aoti(program: ExportedProgram, path: str | os.PathLike[str]) -> str:
    """Compile ``program`` by AOTInductor into the package ``path``, which ends in ``.pt2``; return its path.

    Needs a C++ compiler. Raises AmpGraphError if the package cannot be compiled or written.
    """
    _refuse_path(path)
    if not os.fspath(path).endswith(".pt2"):
        raise CaptureError(
            f"export: a package of AOTInductor is a .pt2 file, and {os.fspath(path)} is not\n"
            "  legal: a path that ends in .pt2\n  fix:   to_aoti(program, 'model.pt2')"
        )
    try:
        return compile_package(program, os.fspath(path))
    except Exception as error:  # compilers raise errors of many types
        raise CaptureError(
            f"export: AOTInductor cannot compile the program: {_first_line(error)}\n"
            "  legal: operators that Inductor compiles, and a C++ compiler\n"
            "  fix:   torch.export.save(program, 'model.pt2') needs none"
        ) from error


def _onnx_program(program: ExportedProgram, opset: int | None) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.onnx's own, of its dependencies
            made = torch.onnx.export(program, (), None, dynamo=True, opset_version=opset, verbose=False)
    except Exception as error:  # torch.onnx raises errors of many types
        raise CaptureError(
            f"export: torch.onnx cannot write the program: {_first_line(error)}\n"
            "  legal: operators that torch.onnx.export(program, dynamo=True) translates\n"
            "  fix:   torch.export.save(program, 'model.pt2') takes every operator"
        ) from error
    assert made is not None, "torch.onnx.export(dynamo=True) returns a program"
    found = made.model.opset_imports.get("")
    if opset is not None and found != opset:
        raise CaptureError(
            f"export: torch.onnx wrote opset {found}, as it cannot convert the program to opset {opset}\n"
            f"  legal: {found}, and others that it converts to\n  fix:   opset={found}"
        )
    return made


def _first_line(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()] or [""]
    return f"{type(cause).__name__}: {lines[0][:300]}"


def _refuse_without(package: str) -> None:
    if find_spec(package) is None:
        raise AmpGraphError(
            f"export: {package} is not installed\n  legal: an installation with the extra [export]\n"
            "  fix:   pip install 'amp-graph[export]'"
        )


def _refuse_path(path: str | os.PathLike[str]) -> None:
    """Raise for a path that cannot be written, before anything is compiled."""
    if what := why_unwritable(path):
        raise AmpGraphError(
            f"export: cannot write {os.fspath(path)}: {what}\n  legal: a file in a directory that exists\n"
            "  fix:   a path such as ./model.pt2"
        )
