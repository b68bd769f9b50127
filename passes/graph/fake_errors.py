"""Explain torch's errors about C code on fake tensors to the author of a pass.

Before: "Cannot access data pointer of Tensor ... see custom_ops_landing_page.html". After: what is legal, and the fix.
"""

from __future__ import annotations

import re

# Messages of torch (2.11 - 2.13), and of code that accesses the memory of a fake tensor.
_SAID = re.compile(
    r"data pointer|custom_ops_landing_page|no fake impl|\.numpy\(\) is not supported for tensor subclasses"
    r"|'FakeTensor' object has no attribute|not 'FakeTensor'|Don't know how to convert parameter"
)
_TYPES = frozenset({"UnsupportedOperatorException", "UnsupportedFakeTensorException"})
HELP = (
    "it runs C code on fake tensors, which have dtypes and sizes but no memory\n"
    "  legal: torch's functions, and operators that say what they return for fake tensors\n"
    "  fix:   make the C function an operator: define_as_typed(function, fake), of\n"
    "         amp_graph.passes.native.operator_library;\n"
    "         where fake returns an empty tensor of the result's dtype and sizes"
)


def told_of_fakes(error: BaseException | None) -> str:
    """Return the explanation for an error that comes from running C code on fake tensors; "" for any other."""
    while error is not None:
        if type(error).__name__ in _TYPES or _SAID.search(str(error)):
            return HELP
        error = error.__cause__
    return ""
