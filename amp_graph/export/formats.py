"""Writes an exported program as ONNX.

Before: ``program``, of ``export``. After: ``model.onnx``, which onnxruntime runs. It is not written if the opset of an
operator lacks a dtype that it is given: a model of opset 18 with a bf16 convolution loads nowhere.
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


def to_onnx(program: ExportedProgram, path: str | os.PathLike[str], opset: int | None = None) -> Any:
    """Write ``program`` to ``path`` as ONNX of version ``opset``; return torch's ``ONNXProgram``.

    opset: an operator set of the standard, by default that of torch.onnx.

    Raises AmpGraphError if a package is missing, if an operator of that version does not take a dtype of the program,
    if torch.onnx cannot write an operator, and if the file cannot be written; no file is written then.
    """
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise AmpGraphError(
                f"export: {package} is not installed\n  legal: an installation with the extra [export]\n"
                "  fix:   pip install 'amp-graph[export]'"
            )
    refuse_unwritable(path)  # before anything is compiled
    with warnings.catch_warnings(), Attempt() as tried:  # torch.onnx raises errors of many types
        warnings.simplefilter("ignore")  # torch.onnx's own, of its dependencies
        made = torch.onnx.export(program, (), None, dynamo=True, opset_version=opset, verbose=False)
    if tried.error is not None:
        cause: BaseException = tried.error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise CaptureError(
            f"export: torch.onnx cannot write the program: {type(cause).__name__}: {first_line(cause)[:300]}\n"
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
    refuse_missing_types(made.model)
    made.save(os.fspath(path))
    return made


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Raise AmpGraphError for a path that no file can be written to."""
    if what := why_unwritable(path):
        raise AmpGraphError(
            f"export: cannot write {os.fspath(path)}: {what}\n  legal: a file in a directory that exists\n"
            "  fix:   a path such as ./model.pt2, ./model.onnx"
        )


NAMES = {name: f"tensor({name.lower()})" for name in ("BFLOAT16", "FLOAT16", "FLOAT", "DOUBLE")}


def refuse_missing_types(model: Any) -> None:
    """Raise CaptureError for the first operator of ``model``, an ``onnx_ir.Model``, that does not take its dtypes."""
    from onnx import defs  # may be missing where nothing is written as ONNX

    opset = model.opset_imports.get("", 0)
    for node in model.graph:
        dtypes = {v.dtype.name for v in node.inputs if v is not None and v.dtype is not None}
        refused = (one for one in sorted(dtypes & NAMES.keys()) if not (node.domain or _takes(defs, node, opset, one)))
        for dtype in refused:
            later = range(opset + 1, defs.onnx_opset_version() + 1)
            first = next((one for one in later if _takes(defs, node, one, dtype)), None)
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
    typed = ((place, given.dtype) for place, given in enumerate(node.inputs) if given is not None)
    formal = (schema.inputs[min(place, len(schema.inputs) - 1)] for place, of in typed if of and of.name == dtype)
    return all(NAMES[dtype] in map(str, one.types) for one in formal)
