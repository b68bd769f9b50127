"""Record the values of a traced graph, which has none, by running it on fakes of example inputs.

Before: ``torch.fx.symbolic_trace(model)``. After: its modules inlined, and ``node.meta["val"]`` of each node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.errors import CaptureError
from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.propagate_fake_values import inline_modules, record_values
from amp_graph.passes.torch_compat.dynamo_settings import errors_not_logged
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA


def with_example_values(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Return ``gm`` with its modules inlined and the values that ``example_inputs`` give; nothing is computed.

    Raises CaptureError for inputs that are not those of the graph, and for a graph that does not run on fakes of them.
    """
    _check_inputs(gm, example_inputs)
    inlined = inline_modules(gm)
    with errors_not_logged(), Attempt() as tried:
        record_values(inlined, example_inputs)
    if tried.error is not None:
        raise CaptureError(_why(tried.error)) from tried.error
    return inlined


def _check_inputs(gm: GraphModule, given: Sequence[Any]) -> None:
    """Raise CaptureError where ``given`` are not as many as the inputs of ``gm``, or no sequence of inputs."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = ", ".join(str(n.target) for n in inputs)
    if isinstance(given, (torch.Tensor, str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise CaptureError(
            f"rewrite: example_inputs is a {type(given).__name__}, not a sequence of the graph's inputs\n"
            f"  legal: a tuple or list of the graph's inputs in order: {names or 'none'}\n  fix:   example_inputs=(x,)"
        )
    any_number = any(str(n.target).startswith("*") for n in inputs)
    needed = sum(not n.args and not str(n.target).startswith("*") for n in inputs)
    if len(given) < needed or (len(given) > len(inputs) and not any_number):
        raise CaptureError(
            f"rewrite: {len(given)} example_inputs for a graph of {len(inputs)} inputs\n"
            f"  legal: the graph's inputs in order: {names or 'none'}\n  fix:   one example for each of them"
        )


def _why(error: Exception) -> str:
    """Say why a graph did not run on fakes of its example inputs, and what to do."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, DEPENDS_ON_DATA):
        found = found.__cause__ or found.__context__
    said, _, rest = str(error).partition("\n")
    where = next((line for line in rest.splitlines() if line.startswith("While executing")), "").partition(" : ")[0]
    place = f" ({where[:1].lower()}{where[1:]})" if where else ""
    if found is not None:
        return (
            f"rewrite: a value or a shape in the graph depends on the numbers of its inputs{place}: {said}\n"
            "  legal: a traced graph whose shapes the shapes of its inputs tell\n"
            "  fix:   amp_graph.convert(model), which captures such a model in parts"
        )
    return (
        f"rewrite: the graph does not run on the example_inputs{place}: {type(error).__name__}: {said}\n"
        "  legal: inputs of the shapes and dtypes that graph_module(*example_inputs) takes\n"
        "  fix:   call graph_module(*example_inputs), and mend what it says"
    )
