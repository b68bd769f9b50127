"""Mends of Dynamo that act while one of our captures runs: private names of torch, replaced and put back.

Before: Dynamo unrolls a loop whose end a value decides. After ``mended()``: it does not, until the block ends. Each
was checked on torch 2.11 - 2.13; tests/passes/torch_compat/test_dynamo_patches.py fails once torch needs one no longer.
Substitutes are functions with the same results as torch functions that read values while they are traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import symbolic_convert, variables
from torch._dynamo.convert_frame import compile_lock  # held by each of Dynamo's captures
from torch.nn.modules import transformer

from amp_graph.passes.torch_compat import torch_version
from amp_graph.passes.torch_compat.fake import without_cast_cache


@dataclass
class Masks:
    """Whether the masks of transformers hear that they are captured, and whether they asked, in the running capture."""

    told: bool = False
    asked: bool = False


_MASKS = [Masks()]  # the last one is of the running capture; written only by who holds ``compile_lock``
Plain = Callable[..., Any]


@contextlib.contextmanager
def mended(*, tells_masks: bool) -> Iterator[Masks]:
    """Apply ``MENDS``, with Dynamo's own lock held, so that no other capture sees them."""
    with compile_lock, contextlib.ExitStack() as undo:
        for owner, name, mend in MENDS:
            if (plain := vars(owner).get(name)) is not None:
                setattr(owner, name, mend(plain))
                undo.callback(setattr, owner, name, plain)
        _MASKS.append(Masks(tells_masks))
        undo.callback(_MASKS.pop)
        yield _MASKS[-1]


def masks_heard() -> bool:
    """Return whether the masks of transformers heard, in the running capture, that they are captured."""
    return _MASKS[-1].told and _MASKS[-1].asked


def _without_cast_cache(plain: Plain) -> Plain:
    """Have Dynamo's runs on fake tensors do without autocast's cache; see ``without_cast_cache``."""

    def run_node(*args: Any, **kwargs: Any) -> Any:
        with without_cast_cache():
            return plain(*args, **kwargs)

    return run_node


def _to_the_end_of_loops(plain: Plain) -> Plain:
    """Recognize a graph break on a backward jump, as of a ``while``, as in a loop: pytorch/pytorch#111003.

    Dynamo looks for such a jump only behind the break, and treats the iterations of the loop as nested calls: a
    thousand end in a RecursionError, and each keeps its values. A frame with a recognized loop runs as written.
    """

    def maybe_has_backedge(self: Any) -> bool:
        jump = self.current_instruction
        target = getattr(jump.target, "offset", None)
        return plain(self) or (target is not None and target < jump.offset)

    return maybe_has_backedge


def _with_the_reason(plain: Plain) -> Plain:
    """Let Dynamo tell that it cannot trace a ``raise``, so that the user's own error arrives; goes with torch 2.11.

    It asks for the exception that it traced in a ``finally``, which fails where there is none, as for an exception that
    the model keeps in an attribute: an AssertionError hides the graph break.
    """

    def get_current_exception(self: Any) -> Any:
        underway = sys.exc_info()[1]
        if isinstance(underway, torch._dynamo.exc.Unsupported):
            raise underway
        return plain(self)

    return get_current_exception


def _calling_others(plain: Plain) -> Plain:
    """Call substitutes for some functions, as if those were written there; ``is_compiling()`` is what eager code hears.

    ``torch.compiler.substitute_in_graph`` would affect all captures. Where the answer differs, so do the model's
    values: pytorch/pytorch#178677.
    """

    def call_function(self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        function: Any = None
        given = args
        if isinstance(fn, (variables.TorchInGraphFunctionVariable, variables.UserFunctionVariable)):
            function = getattr(fn, "value", getattr(fn, "fn", None))
        elif isinstance(fn, variables.GetAttrVariable) and isinstance(fn.obj, variables.TensorVariable):
            function, given = getattr(torch, fn.name, None), [fn.obj, *args]
        found = _substitute(self, function, kwargs)
        if found is None:
            return plain(self, fn, args, kwargs)
        return plain(self, variables.UserFunctionVariable(found), given, kwargs)

    return call_function


def _substitute(tx: Any, function: Any, kwargs: Any) -> Any:
    if getattr(function, "__name__", "") in _ASK_IF_COMPILED and function.__module__ in _ASKED:
        return None if _is_told_of_capture(tx) else is_compiling
    if function is transformer._detect_is_causal_mask:
        return mask_as_given
    if function is torch.masked_select and "out" not in kwargs:
        return masked_select_of_broadcast
    return None


# What models ask whether they are compiled: these functions of these modules, of which two are deprecated names.
_ASK_IF_COMPILED = ("is_compiling", "is_dynamo_compiling")
_ASKED = ("torch.compiler", "torch._dynamo.external_utils", "torch._utils")
# Modules with helpers that ask for the code that calls them, and what wraps such helpers: ``@deprecated``.
_ASK_FOR_OTHERS = {*_ASKED, "transformers.utils.import_utils", "typing_extensions", "warnings"}


def _is_told_of_capture(tx: Any) -> bool:
    """Return whether code that asks if it is compiled is told so; else it hears what it hears in eager mode.

    torch's code and ours is, as its traced branch computes the same by operators that can be traced; so are the
    helpers of transformers, but not its models. Its masks read their values in eager mode, which breaks a graph: they
    are told so while a whole call may be captured, see ``dynamo_capture``.
    """
    while tx.f_globals.get("__name__") in _ASK_FOR_OTHERS:
        if tx.parent is None:  # a frame of its own, behind a graph break
            return False
        tx = tx.parent
    name = str(tx.f_globals.get("__name__", ""))
    if name == "transformers.masking_utils":
        _MASKS[-1].asked = True
        return _MASKS[-1].told
    if name.startswith("transformers.models."):
        return False
    return name.startswith(("torch.", "amp_graph.", "transformers.")) and name != transformer.__name__


_translator = symbolic_convert.InstructionTranslatorBase
MENDS: tuple[tuple[Any, str, Callable[[Plain], Plain]], ...] = (
    (_translator, "call_function", _calling_others),
    (_translator, "maybe_has_backedge", _to_the_end_of_loops),
    (torch._dynamo.utils, "run_node", _without_cast_cache),
)
if torch_version() < (2, 12):
    MENDS += ((symbolic_convert.ExceptionStack, "get_current_exception", _with_the_reason),)


def is_compiling() -> bool:
    """Return what ``torch.compiler.is_compiling`` returns in eager mode."""
    return False


def mask_as_given(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the caller says that a mask is causal; if unspecified, torch compares it to a causal one.

    A mask known to be causal is not applied: a faster kernel computes the same result.
    """
    return is_causal is True


def masked_select_of_broadcast(input: Tensor, mask: Tensor) -> Any:
    """Return ``torch.masked_select`` of tensors of one shape.

    torch/_subclasses/fake_impls.py bounds the count by the tensor's own elements, and Dynamo asserts this in the graph:
    a mask larger than its tensor fails there.
    """
    input, mask = torch.broadcast_tensors(input, mask)
    return torch.ops.aten.masked_select.default(input, mask)
