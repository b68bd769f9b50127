"""Freezes a converted model for inference: weights are cast, packed and folded once, not at each call.

Before: ``model = amp_graph.convert(model)``, whose calls cast each weight, as those under ``torch.autocast`` do.
After: ``amp_graph.freeze(model)``, whose calls cast none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from amp_graph.capture.conversion import Conversion
from amp_graph.capture.frozen_conversion import FrozenConversion
from amp_graph.convert import convert, converted, refuse_replaced, revert
from amp_graph.errors import CaptureError, warn
from amp_graph.optim.master_weights import master_of
from amp_graph.passes.torch_compat.dispatch import is_wrapper

Model = TypeVar("Model", bound=torch.nn.Module)


def freeze(model: Model, *, keep_fp32_weights: bool = True) -> Model:
    """Let the calls of a converted ``model`` read weights that are cast, packed and folded once; return ``model``.

    The model then computes no gradients: call it under ``torch.no_grad()``. ``thaw(model)`` undoes it, and ``with
    frozen(model):`` freezes it for an evaluation in the middle of training. Parameters stay as they are:
    ``state_dict``, ``load_state_dict``, ``deepcopy``, pickle, ``.to()`` and merging of adapters work. A weight that is
    written is read anew at the next call, with a warning that names it, if torch shows the write: by the version
    counter, other memory or another Parameter. Writes that leave the version counter are not seen: through ``.data`` or
    numpy, by torch's fused optimizers, by another process.

    model: a converted one. keep_fp32_weights: False frees them, as converting at level O2 in eval mode does: the same
    Parameters, but for those of norms and of ``keep_fp32``, hold low precision alone. ``state_dict`` stays fp32, of
    rounded values, and ``thaw`` does not bring back what was rounded away.

    Raises CaptureError for a model that is not converted, whose parameters are sharded, or that is compiled by Inductor
    or another compiler, which may freeze weights by itself (``torch._inductor.config.freezing``); and to free the
    weights of one in training mode, or of one with fp32 masters.
    """
    found = converted("freeze", model)
    if not keep_fp32_weights:
        _free(found)
        found = converted("freeze", model)
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
    refuse_replaced("freeze", found)
    if found.frozen is None:
        found.frozen = FrozenConversion(found)
    found.frozen.put()
    return model


def thaw(model: Model) -> Model:
    """Undo ``freeze`` and return ``model``, which can train again. Raises CaptureError if it is not converted.

    Warns if its fp32 weights are gone: it then trains at level O2, from the rounded ones.
    """
    found = converted("thaw", model)
    if isinstance(found, FrozenConversion):
        refuse_replaced("thaw", found)
        found.thaw()
        if found.policy.level == "O2" and not _has_masters(found.model):
            warn(
                f"amp_graph: the fp32 weights of {type(found.model).__name__} are freed: it trains at level O2 from "
                "rounded ones\n  fix:   amp_graph.revert(model), then load its checkpoint and convert it again"
            )
    return model


def _has_masters(model: torch.nn.Module) -> bool:
    return any(master_of(p) is not None for p in model.parameters())


def _free(found: Conversion) -> None:
    """Hold the weights of a converted model in low precision alone, as level O2 does in eval mode."""
    model = found.model
    if model.training or _has_masters(model):
        state = "is in training mode" if model.training else f"has fp32 masters, by level {found.policy.level}"
        raise CaptureError(
            f"freeze: {type(model).__name__} {state}, so its fp32 weights may still be needed\n"
            "  legal: a model in eval mode that no optimizer trains\n"
            "  fix:   amp_graph.freeze(model.eval(), keep_fp32_weights=False), converted in eval mode at level O2"
        )
    if found.policy.level == "O1":
        policy = replace(found.policy, level="O2")  # may be refused
        convert(revert(model), policy, dynamic=found.dynamic, strict=found.strict, max_graphs=found.max_graphs)


@contextmanager
def frozen(model: Model) -> Iterator[Model]:
    """Freeze ``model`` in the block: ``with torch.no_grad(), amp_graph.frozen(model): evaluate(model)``.

    Its graphs are kept for the next block; weights are cast and packed once a block. A model that was frozen before
    stays so.
    """
    before = isinstance(converted("frozen", model), FrozenConversion)
    freeze(model)
    try:
        yield model
    finally:
        if not before:
            thaw(model)
