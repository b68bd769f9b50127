"""Writes an exported program in other formats: ONNX, and a package of AOTInductor.

Before: ``program``, of ``export``. After: ``model.onnx``, which onnxruntime runs, or ``model.pt2``, which
``torch._inductor.aoti_load_package`` runs; both without amp_graph. Before ONNX is written, each operator is asked
whether its opset takes the dtypes that it is given: a model of opset 18 with a bf16 convolution loads nowhere.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import ExportedProgram

from amp_graph.errors import AmpGraphError, CaptureError
from amp_graph.lists.errors import Attempt, first_line
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
    with Attempt() as tried:  # compilers raise errors of many types
        return compile_package(program, os.fspath(path))
    raise CaptureError(
        f"export: AOTInductor cannot compile the program: {_cause(tried.error)}\n"
        "  legal: operators that Inductor compiles, and a C++ compiler\n"
        "  fix:   torch.export.save(program, 'model.pt2') needs none"
    ) from tried.error


def _onnx_program(program: ExportedProgram, opset: int | None) -> Any:
    with warnings.catch_warnings(), Attempt() as tried:  # torch.onnx raises errors of many types
        warnings.simplefilter("ignore")  # torch.onnx's own, of its dependencies
        made = torch.onnx.export(program, (), None, dynamo=True, opset_version=opset, verbose=False)
    if tried.error is not None:
        raise CaptureError(
            f"export: torch.onnx cannot write the program: {_cause(tried.error)}\n"
            "  legal: operators that torch.onnx.export(program, dynamo=True) translates\n"
            "  fix:   torch.export.save(program, 'model.pt2') takes every operator"
        ) from tried.error
    assert made is not None, "torch.onnx.export(dynamo=True) returns a program"
    found = made.model.opset_imports.get("")
    if opset is not None and found != opset:
        raise CaptureError(
            f"export: torch.onnx wrote opset {found}, as it cannot convert the program to opset {opset}\n"
            f"  legal: {found}, and others that it converts to\n  fix:   opset={found}"
        )
    return made


def _cause(error: BaseException | None) -> str:
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)[:300]}"


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


FLOATS = ("BFLOAT16", "FLOAT16", "FLOAT", "DOUBLE")
NAMES = {"BFLOAT16": "tensor(bfloat16)", "FLOAT16": "tensor(float16)", "FLOAT": "tensor(float)"}
NAMES["DOUBLE"] = "tensor(double)"


def refuse_missing_types(model: Any) -> None:
    """Raise CaptureError for the first operator of ``model``, an ``onnx_ir.Model``, that does not take its dtypes."""
    from onnx import defs  # may be missing where nothing is written as ONNX

    opset = model.opset_imports.get("", 0)
    for node in model.graph:
        dtypes = {v.dtype.name for v in node.inputs if v is not None and v.dtype is not None}
        for dtype in sorted(dtypes & {*FLOATS}):
            if node.domain or _takes(defs, node, opset, dtype):
                continue
            newest = range(opset + 1, defs.onnx_opset_version() + 1)
            first = next((later for later in newest if _takes(defs, node, later, dtype)), None)
            fix = f"opset={first}" if first else "policy='fp16', or policy='bf16,opaque=...' of that operator"
            raise CaptureError(
                f"export: {node.op_type} of ONNX opset {opset} takes no {dtype.lower()} ({node.name})\n"
                f"  legal: {f'opset {first} and newer' if first else 'no opset that is installed'}\n  fix:   {fix}"
            )


def _takes(defs: Any, node: Any, opset: int, dtype: str) -> bool:
    """Say whether some typed input of the operator may have ``dtype`` in ``opset``; True for an unknown operator."""
    try:
        schema = defs.get_schema(node.op_type, opset, node.domain)
    except defs.SchemaError:
        return True
    for place, given in enumerate(node.inputs):
        if given is None or given.dtype is None or given.dtype.name != dtype:
            continue
        formal = schema.inputs[min(place, len(schema.inputs) - 1)]
        if NAMES[dtype] not in {str(t) for t in formal.types}:
            return False
    return True
