"""Check that the operators of an ONNX model take the dtypes that they are given in its opset.

Before: a model of opset 18 with a bf16 convolution, which no runtime loads. After: one error that names the operator,
the dtype and the oldest opset that has it.
"""

from __future__ import annotations

from typing import Any

from amp_graph.errors import CaptureError

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
