"""The parts of a model that is converted as a whole and sharded by ``fully_shard`` in units: what is captured each.

Before: a model whose units gather in hooks, across which no graph reaches. After: ``parts_between_units(model)``: its
units, and what is between them; each is converted, and has graphs of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.nn import Embedding, Module, Parameter

from amp_graph.model_state import CONVERSION
from amp_graph.passes.torch_compat.modules import behind_checkpoint, is_sharded


def parts_between_units(model: Module) -> Iterator[tuple[Module, Module]]:
    """Yield the largest parts of ``model`` that a graph can span, and what ``fully_shard`` may have been applied to.

    These are one module, but where a unit is what ``checkpoint_wrapper`` returned: the checkpoint is around the graph.
    None if no unit is in ``model``.
    """
    inner = behind_checkpoint(model)
    if is_sharded(model) and inner is not model and not _has_units(inner):
        yield inner, model
    elif _has_units(model):
        yield from _parts(model)


def _parts(model: Module) -> Iterator[tuple[Module, Module]]:
    for child in model.children():
        part = behind_checkpoint(child)
        if _has_units(part) or type(part).forward is Module.forward:  # of a container, which is not called
            yield from _parts(part)
        elif CONVERSION not in part.__dict__ and (is_sharded(child) or is_sharded(part) or multiplies(part)):
            yield part, part if is_sharded(part) else child


def _has_units(model: Module) -> bool:
    return any(is_sharded(part) for part in model.modules() if part is not model)


def multiplies(model: Module, parameters: Iterable[Parameter] | None = None) -> bool:
    """Say whether any of ``parameters`` (None: all) is a weight of a product: only such ones gain by low precision."""
    tables = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, Embedding)}
    return any(p.dim() > 1 and id(p) not in tables for p in parameters or model.parameters())
