"""Changes to Dynamo's behavior during our captures: patches of private names.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import transformer

from amp_graph.passes.torch_compat.capture_substitutes import batch_norm_of_averages, is_compiling, mask_as_given
from amp_graph.passes.torch_compat.fake import free_unbacked_symbols

DTYPE_READ = "amp_dtype_read"  # meta key of a node: the captured code read the dtype of its value
GRADIENT_HOOK = "amp_gradient_hook"  # meta key of a node: Dynamo's own custom function, for a hook of a tensor


def record_reads_of_dtype() -> None:
    """Let Dynamo mark the node of each tensor whose ``dtype`` the code reads; 2.11 - 2.13. No other effect."""
    traced = torch._dynamo.variables.TensorVariable
    plain: Any = traced.method_attr_dtype
    if hasattr(plain, DTYPE_READ):
        return

    def method_attr_dtype(self: Any, tx: Any) -> Any:
        node = getattr(getattr(self, "proxy", None), "node", None)
        if node is not None:
            node.meta[DTYPE_READ] = True
        return plain(self, tx)

    setattr(method_attr_dtype, DTYPE_READ, True)
    traced.method_attr_dtype = method_attr_dtype  # type: ignore[method-assign]


def reads_of_dtype(node: torch.fx.Node) -> bool:
    """Say whether the captured code read the dtype of the value of ``node``."""
    return DTYPE_READ in node.meta


def mark_gradient_hooks() -> None:
    """Let Dynamo mark the functions that it writes for hooks of computed tensors; 2.11 and 2.12. No other effect.

    Their forward returns its operand. 2.13 and later have an operator of their own in place of such a function.
    """
    traced: Any = torch._dynamo.variables.TensorVariable
    plain = getattr(traced, "_method_register_hook", None)
    if plain is None or hasattr(plain, GRADIENT_HOOK):
        return

    def _method_register_hook(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.as_proxy().node
        handle, node = plain(self, tx, *args, **kwargs), self.as_proxy().node
        if node is not before:  # the tensor is the function's result from now on
            for made in (node, *node.all_input_nodes):
                made.meta[GRADIENT_HOOK] = True
        return handle

    setattr(_method_register_hook, GRADIENT_HOOK, True)
    traced._method_register_hook = _method_register_hook


def is_gradient_hook(node: torch.fx.Node) -> bool:
    """Say whether ``node`` is a function that Dynamo wrote for a hook of the user's."""
    return GRADIENT_HOOK in node.meta


class _Capturing(threading.local):
    """Whether this thread is running one of our captures, and whether its graph will run operator by operator."""

    is_on = False
    is_eager = False
    is_whole = False  # a graph break would end the capture, so that nothing has run


capturing = _Capturing()


def leave_out_guard_timing() -> None:
    """Keep Dynamo from timing the guards of our captures; 2.11 - 2.13.

    The timing first flushes the CPU's caches: 26 ms of a capture's half second, for a line in a log.
    """
    guards: Any = torch._dynamo.guards
    plain = guards.profile_guard_manager
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def profile_guard_manager(*args: Any) -> float:
        return 0.0 if capturing.is_on else plain(*args)

    guards.profile_guard_manager = profile_guard_manager


def leave_out_guard_of_hooks() -> None:
    """Keep Dynamo from guarding on the default saved-tensor hooks where a graph runs operator by operator; 2.11 - 2.13.

    Under autograd itself the hooks that are active in a call see what that call saves. AOTAutograd traces hooks into a
    graph, which is why there is such a guard. It is the only one in Python: 2 us of a call, with cold caches.
    """
    builder: Any = torch._dynamo.guards.GuardBuilder
    plain = getattr(builder, "AUTOGRAD_SAVED_TENSORS_HOOKS", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def AUTOGRAD_SAVED_TENSORS_HOOKS(self: Any, guard: Any) -> None:
        if not (capturing.is_on and capturing.is_eager):
            plain(self, guard)

    builder.AUTOGRAD_SAVED_TENSORS_HOOKS = AUTOGRAD_SAVED_TENSORS_HOOKS


def leave_cast_cache_alone() -> None:
    """Keep Dynamo's runs on fake tensors from using autocast's cache of weight casts.

    Dynamo calls operators while holding the GIL, because its dispatcher is in Python. Under it, autocast would wait for
    the lock of its cache. A thread that leaves autocast holds that lock and needs the GIL to free the cache: a
    deadlock. torch/_dynamo/utils.py, 2.11 - 2.13.
    """
    utils: Any = torch._dynamo.utils
    plain = utils.run_node
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def run_node(*args: Any, **kwargs: Any) -> Any:
        if not (capturing.is_on and torch.is_autocast_cache_enabled()):
            return plain(*args, **kwargs)
        torch.set_autocast_cache_enabled(False)
        try:
            return plain(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(True)

    utils.run_node = run_node


def let_masks_broadcast() -> None:
    """Let ``torch.masked_select`` in our captures return up to the broadcast number of elements; 2.11 - 2.13.

    torch/_subclasses/fake_impls.py bounds the count by the tensor's own elements, and Dynamo asserts this in the graph:
    a mask larger than its tensor fails there.
    """
    known: Any = torch._subclasses.fake_impls.op_implementations_dict
    operator = torch.ops.aten.masked_select.default
    plain = known[operator]
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def masked_select(mode: Any, func: Any, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
        if capturing.is_on:
            tensor, mask = torch.broadcast_tensors(tensor, mask)
        return plain(mode, func, tensor, mask)

    known[operator] = masked_select


def see_loops_to_their_end() -> None:
    """Let our captures recognize a graph break on a backward jump, as of a ``while``, as in a loop; 2.11 - 2.13.

    Dynamo looks for such a jump only behind the break, and treats the iterations of the loop as nested calls: a
    thousand end in a RecursionError, and each keeps its values. A frame with a recognized loop runs as written.
    """
    translator: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
    plain: Any = getattr(translator, "maybe_has_backedge", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def maybe_has_backedge(self: Any) -> bool:
        jump = self.current_instruction
        target = getattr(jump.target, "offset", None) if capturing.is_on else None
        return plain(self) or (target is not None and target < jump.offset)

    translator.maybe_has_backedge = maybe_has_backedge


def keep_why_a_raise_is_not_captured() -> None:
    """Let Dynamo tell that it cannot trace a ``raise``, so that the user's own error arrives; 2.11 - 2.13.

    It asks for the exception that it traced in a ``finally``, which fails where there is none, as for an exception that
    the model keeps in an attribute (2.11): an AssertionError hides the graph break.
    """
    stack: Any = getattr(torch._dynamo.symbolic_convert, "ExceptionStack", None)
    plain: Any = getattr(stack, "get_current_exception", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def get_current_exception(self: Any) -> Any:
        underway = sys.exc_info()[1]
        if capturing.is_on and isinstance(underway, torch._dynamo.exc.Unsupported):
            raise underway
        return plain(self)

    stack.get_current_exception = get_current_exception


# What models ask whether they are compiled; 2.11 - 2.13.
_ASK_IF_COMPILED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._dynamo.external_utils.is_compiling,
    torch._utils.is_compiling,
)
# Modules with helpers that ask for the code that calls them, and what wraps such helpers.
_ASK_FOR_OTHERS = {"transformers.utils.import_utils", "torch._dynamo.external_utils", "torch._utils", "torch.compiler"}
_ASK_FOR_OTHERS |= {"typing_extensions", "warnings"}  # of ``@deprecated``


def _is_told_of_capture(tx: Any) -> bool:
    """Return whether code that asks if it is compiled is told so; else it hears what it hears in eager mode.

    torch's code and ours is, as its traced branch computes the same by operators that can be traced; so are the
    helpers of transformers, but not its models. Its masks read their values in eager mode, which breaks a graph: they
    are told so until the capture of a whole call has failed.
    """
    while tx.f_globals.get("__name__") in _ASK_FOR_OTHERS:
        if tx.parent is None:  # a frame of its own, behind a graph break
            return False
        tx = tx.parent
    name = str(tx.f_globals.get("__name__", ""))
    if name == "transformers.masking_utils":
        return capturing.is_whole
    if name.startswith("transformers.models."):
        return False
    return name.startswith(("torch.", "amp_graph.", "transformers.")) and name != transformer.__name__


# Functions and their substitutes in our captures: used always, or only if a given number is a tensor's value.
_OTHERWISE: dict[Any, tuple[Callable[..., Any], bool]] = {
    transformer._detect_is_causal_mask: (mask_as_given, False),  # 2.11 - 2.13
    torch.nn.functional.batch_norm: (batch_norm_of_averages, True),
}


def capture_some_otherwise() -> None:
    """Let Dynamo replace some functions by others, as if those were written there; 2.11 - 2.13.

    Only in our captures: ``torch.compiler.substitute_in_graph`` would affect all captures.
    """
    written = torch._dynamo.variables.UserFunctionVariable
    _asks(torch._dynamo.variables.TorchInGraphFunctionVariable, lambda variable: variable.value, written)
    _asks(written, lambda variable: variable.fn, written)


def _asks(kind: Any, function_of: Callable[[Any], Any], written: Any) -> None:
    plain = kind.__dict__["call_function"]
    if hasattr(plain, "asks_amp_graph"):
        return

    @functools.wraps(plain)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if capturing.is_on and function_of(self) in _ASK_IF_COMPILED and not _is_told_of_capture(tx):
            return written(is_compiling).call_function(tx, args, kwargs)
        if capturing.is_on and (found := _OTHERWISE.get(function_of(self))) is not None:
            instead, numbers_of_tensors = found
            if not numbers_of_tensors or any(map(_is_number_of_tensor, (*args, *kwargs.values()))):
                return written(instead).call_function(tx, args, kwargs)
        return plain(self, tx, args, kwargs)

    call_function.asks_amp_graph = True  # type: ignore[attr-defined]
    kind.call_function = call_function


def _is_number_of_tensor(variable: Any) -> bool:
    number = getattr(variable, "sym_num", None)
    return number is not None and bool(free_unbacked_symbols(number))
