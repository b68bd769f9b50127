"""Freezes a converted model for inference: weights are cast, packed and folded once, not at each call.

Before: ``model = amp_graph.convert(model)``, whose calls cast each weight, as those under ``torch.autocast`` do.
After: ``amp_graph.freeze(model)``, whose calls cast none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from amp_graph.capture.conversion import WRAPPERS, Conversion, conversion_of
from amp_graph.capture.frozen_conversion import FrozenConversion
from amp_graph.errors import CaptureError
from amp_graph.passes.torch_compat.dispatch import is_wrapper

Model = TypeVar("Model", bound=torch.nn.Module)


def freeze(model: Model) -> Model:
    """Let the calls of a converted ``model`` read weights that are cast, packed and folded once; return ``model``.

    The model then computes no gradients: call it under ``torch.no_grad()``. ``thaw(model)`` undoes it, and ``with
    frozen(model):`` freezes it for an evaluation in the middle of training. Parameters stay as they are:
    ``state_dict``, ``load_state_dict``, ``deepcopy``, pickle, ``.to()`` and merging of adapters work. A weight that is
    written is read anew at the next call, with a warning that names it, if torch shows the write: by the version
    counter, other memory or another Parameter. Writes that leave the version counter are not seen: through ``.data`` or
    numpy, by torch's fused optimizers, by another process.

    model: a converted one. Raises CaptureError for one that is not, whose parameters are sharded, or that is compiled
    by Inductor or another compiler, which may freeze weights by itself (``torch._inductor.config.freezing``).
    """
    found = _conversion("freeze", model)
    if isinstance(found, FrozenConversion):
        return model
    if found.compile != "eager":
        raise CaptureError(
            f"freeze: the model is compiled by {found.compile!r}, which packs weights itself\n"
            "  legal: compile='eager'\n  fix:   amp_graph.freeze(amp_graph.convert(amp_graph.revert(model)))"
        )
    sharded = [name for name, p in found.model.named_parameters() if is_wrapper(p) or hasattr(p, "_fsdp_flattened")]
    if sharded:
        raise CaptureError(
            f"freeze: {sharded[0]} is sharded or a tensor subclass: its values are gathered at each call\n"
            "  legal: plain parameters\n  fix:   leave the model as it is: its weights are cast at each call"
        )
    _refuse_replaced(found)
    if found.frozen is None:
        found.frozen = FrozenConversion(found)
    found.frozen.put()
    return model


def thaw(model: Model) -> Model:
    """Undo ``freeze`` and return ``model``, which can train again. Raises CaptureError if it is not converted."""
    found = _conversion("thaw", model)
    if isinstance(found, FrozenConversion):
        _refuse_replaced(found)
        found.thaw()
    return model


@contextmanager
def frozen(model: Model) -> Iterator[Model]:
    """Freeze ``model`` in the block: ``with torch.no_grad(), amp_graph.frozen(model): evaluate(model)``.

    Its graphs are kept for the next block; weights are cast and packed once a block. A model that was frozen before
    stays so.
    """
    before = isinstance(_conversion("frozen", model), FrozenConversion)
    freeze(model)
    try:
        yield model
    finally:
        if not before:
            thaw(model)


def _conversion(caller: str, model: torch.nn.Module) -> Conversion:
    found = conversion_of(model)
    if found is None:
        kind = type(model.module if isinstance(model, WRAPPERS) else model).__name__
        raise CaptureError(f"{caller}: the {kind} is not converted\n  fix:   amp_graph.convert(model) first")
    return found


def _refuse_replaced(found: Conversion) -> None:
    """Raise CaptureError if other code has put its own forward over that of the conversion."""
    if found.model.__dict__.get("forward") is not found:
        raise CaptureError(
            "freeze: model.forward was replaced after amp_graph.convert, by a function that calls the converted one\n"
            "  fix:   undo that replacement first, then amp_graph.freeze(model) or amp_graph.thaw(model)"
        )
