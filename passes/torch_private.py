"""Every private torch name that amp_graph uses, in one place, each with the versions it was checked on.

Before: ``from torch._guards import tracing`` in six files. After: one file to read when torch moves.
Checked on 2.13.0 (all of it run by the test-suite); 2.11 and 2.12 by reading their sources.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import inspect
import itertools
import logging
import math
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # 2.11 - 2.13
from torch._dynamo import config as dynamo_config  # 2.11 - 2.13
from torch._dynamo.convert_frame import compile_lock  # 2.11 - 2.13: held by each of Dynamo's captures
from torch._functorch.autograd_function import autograd_function_apply  # 2.11 - 2.13
from torch._guards import tracing  # 2.11 - 2.13: tracing(None) hides Dynamo's own context
from torch._inductor import config as inductor_config  # 2.11 - 2.13
from torch._ops import HigherOrderOperator, OpOverload  # 2.11 - 2.13
from torch._subclasses.fake_tensor import (  # 2.11 - 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx import _symbolic_trace  # 2.11 - 2.13
from torch.fx._lazy_graph_module import _LazyGraphModule  # 2.11 - 2.13
from torch.fx.experimental.proxy_tensor import make_fx  # 2.11 - 2.13
from torch.fx.experimental.symbolic_shapes import (  # 2.11 - 2.13
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.fx.experimental.validator import ValidationException  # 2.11 - 2.13
from torch.multiprocessing.reductions import StorageWeakRef  # 2.11 - 2.13
from torch.nn.modules import transformer
from torch.nn.utils.stateless import _reparametrize_module  # 2.11 - 2.13
from torch.optim.optimizer import (  # 2.11 - 2.13; two are public, but in no list of its module
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes as outside_modes  # 2.11 - 2.13: no tracer, no fakes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.11 - 2.13

from amp_graph.passes.captured_otherwise import batch_norm_of_averages, mask_as_given
from amp_graph.passes.collector import collector_waits

__all__ = [
    "CHANGING_INTS",
    "DEPENDS_ON_DATA",
    "NO_LIMIT",
    "CaptureChoice",
    "CaptureListener",
    "FakeTensor",
    "FakeTensorMode",
    "Find",
    "HigherOrderOperator",
    "ModesOfThread",
    "OpOverload",
    "StorageWeakRef",
    "a_capture_runs",
    "address_of",
    "all_bytes_of",
    "allow_in_graph",
    "any_branch_of_backward",
    "at_end_of_backward",
    "autograd_function_apply",
    "autograd_inside",
    "being_traced",
    "borrow",
    "break_reasons",
    "bytes_of",
    "capture_with_dynamo",
    "compiled_frames",
    "compiled_in_place",
    "concrete_size",
    "convolution_pointwise",
    "cpu_has_amx",
    "cpu_has_bf16",
    "dispatch_for_data",
    "dispatch_has_kernel",
    "dynamo_listens",
    "exchange_memory",
    "failed_guards",
    "flash_attention_cpu",
    "forget_what_can_be_overridden",
    "free_unbacked_symbols",
    "holders",
    "holders_of_storage",
    "in_forward_mode",
    "in_transform",
    "is_batched",
    "is_dense_fp32",
    "is_in_mode",
    "is_private_mapping",
    "is_recorded",
    "is_remembered",
    "is_seen",
    "is_sharded",
    "is_wrapper",
    "keeps_lstm_workspaces",
    "linear_of_packed_weight",
    "linear_pointwise",
    "load_optimizer_states_as",
    "make_fx",
    "memory_owner",
    "mode_without_capture",
    "modules_with_accesses",
    "multiplies_bf16",
    "never_compiled",
    "not_captured",
    "number_of_backward",
    "numel",
    "on_every_optimizer_step",
    "one_capture_at_a_time",
    "outer_saved_tensors_hooks",
    "outside_dynamo",
    "outside_modes",
    "own_code_object",
    "pack_convolution_weight",
    "pack_linear_weight",
    "parameters_as_inputs",
    "plain_forward",
    "plain_step",
    "reads_of_dtype",
    "refused_under_fx",
    "saved_tensors_hooks_are_enabled",
    "set_sums_of_products",
    "softmax_backward",
    "statically_known_true",
    "storage_holders",
    "storage_id",
    "storage_key",
    "storage_of",
    "stream_of",
    "sums_of_products",
    "takes_fp32",
    "takes_kernels_of_ours",
    "tensor_guard",
    "tracing_fake",
    "undisabled",
    "unflatten",
    "unset_fake_temporarily",
    "wait_for_traces_of_others",
    "weakly",
    "with_parameters",
]

# Tensors that no subclass looks after.
PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
# Dynamo's own limits (8 per code object, 256 in all) would turn the ninth shape into a silent fp32 run. Ours are a
# ``CaptureChoice``.
NO_LIMIT = 1_000_000


# What is raised of an operation on fake tensors that needs the data.
DEPENDS_ON_DATA = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def tracing_fake(mode: FakeTensorMode, *, symbolic: bool = True) -> Iterator[None]:
    """Run under ``mode`` outside Dynamo's tracing context and without adding guards on symbolic sizes.

    Sizes that depend on data are new symbols in what is computed here, which Dynamo is not to look for in its graph.
    ``symbolic``: use the Python dispatcher, as Dynamo does, because kernels in C++ refuse symbolic sizes. It
    takes some composites apart in other operations than the C++ ones that will run.
    """
    shape_env = mode.shape_env
    guards = shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext()
    symbols = shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()
    python = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    with tracing(None), guards, symbols, python, mode:
        yield


def dispatch_for_data(by_data: bool) -> contextlib.AbstractContextManager[Any]:
    """Return what a trace runs under: where sizes depend on data, torch's rules in Python; those in C++ refuse them."""
    return enable_python_dispatcher() if by_data else contextlib.nullcontext()


# Formulas of backward in C++ that ask for sizes or strides only to choose between two ways to the same gradient: how a
# product is laid out, that a sum of one element is that element. torch/csrc/autograd/FunctionsManual.cpp, 2.11 - 2.13.
ANY_BRANCH = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Cumsum", "LinearBackward")
)


@contextlib.contextmanager
def any_branch_of_backward(traced: torch.Tensor) -> Iterator[None]:
    """Let those formulas take sizes that depend on data for large ones, while backward of ``traced`` is traced."""
    env: Any = traced.fake_mode.shape_env if isinstance(traced, FakeTensor) else None
    if env is None:
        yield
        return
    plain = env.evaluate_sym_node

    def evaluate_sym_node(symbolic: Any, size_oblivious: bool = False, **others: Any) -> Any:
        node = torch._C._current_autograd_node()
        known = node is not None and node.name() in ANY_BRANCH
        try:
            return plain(symbolic, size_oblivious or known, **others)
        except GuardOnDataDependentSymNode:
            if known and symbolic.pytype is bool:
                return False
            raise

    env.evaluate_sym_node = evaluate_sym_node
    try:
        yield
    finally:
        del env.evaluate_sym_node


@contextlib.contextmanager
def autograd_inside() -> Iterator[None]:
    """Let autograd record inside of an operator's kernel, from which dispatch keeps it away; 2.11 to 2.13."""
    kept = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        kept = kept.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), kept), torch.enable_grad():
        yield


UNKNOWN = 4  # a number for a size of which nothing is known
LARGEST = 2**31  # what torch says of a size that is any: a little less than 2 ** 63


def _at_most(known: Any) -> int:
    """Return the largest number in a range of sizes, if that says anything; 2.11 - 2.13."""
    upper = known.upper if known is not None else None
    return int(upper) if upper is not None and upper.is_finite and 0 < upper < LARGEST else UNKNOWN


def concrete_size(size: Any) -> int:
    """Return a number for a symbolic size: its hint, or one for each symbol that has none.

    That is the most that the symbol can be, as of rows that a mask selects, or 4 where that is not known.
    """
    if isinstance(size, torch.SymInt):
        if size.node.is_nested_int():  # the ragged dimension of a nested tensor
            return 4
        if size.node.hint is not None:
            return int(size.node.hint)
        expression, ranges = size.node.expr, size.node.shape_env.var_to_range
        found = expression.subs({symbol: _at_most(ranges.get(symbol)) for symbol in expression.free_symbols})
        return int(found) if found.is_number and found.is_finite else UNKNOWN
    return int(size)


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of a fake tensor, with a number for each symbolic size."""
    return math.prod(map(concrete_size, tensor.shape))


# torch's own accesses to a tensor's memory, which ``watched_memory`` overrides for everybody else; 2.11 - 2.13.
_BASE: Any = torch._C.TensorBase
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = _BASE.untyped_storage
address_of: Callable[[torch.Tensor], int] = _BASE.data_ptr
exchange_memory: Callable[[torch.Tensor, torch.Tensor], None] = _BASE.data.__set__  # ``tensor.data = other``
# What identifies the storage of a tensor; raises where it has none. No mode and no subclass hears of it.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return what identifies the storage of ``tensor``; None where it has none (sparse, subclasses)."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the storage of ``tensor``; of what has none (packed tensors), of its elements."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return storage_of(tensor).nbytes()


unsafe_view = torch.ops.aten._unsafe_view.default._op  # 2.11 - 2.13: without the overload's own bookkeeping


def borrow(source: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return ``low`` as a tensor whose gradient goes to ``source`` in the dtype of ``source``; nothing is cast.

    The engine casts a gradient to the dtype of the value that the receiving node was made for, as the backward of a
    cast does, for create_graph and batched gradients too. Here that is a node which passes ``source`` on, and then
    the values are exchanged. ``unsafe_view`` is such a node whose result is no view and has its own version counter.
    The node saves nothing and so serves any number of backwards, whose gradients it adds in that dtype. Where one call
    has several readers, a view of the result adds theirs up before they are cast, as a plain cast's backward does.
    ``source`` lives as long as the result.
    """
    given = unsafe_view(source, source.shape)
    exchange_memory(given, low)
    return given


def takes_fp32(ctx: Any, place: int) -> bool:
    """Say whether the ``place``-th tensor that a Function was given wants its gradient in fp32, as ``borrow``'s do.

    Asked in backward; 2.11 - 2.13. What it is handed in another dtype the engine casts.
    """
    node, output = ctx.next_functions[place]
    return node is not None and node._input_metadata[output].dtype == torch.float32


def holders(owner: Any, name: str) -> tuple[tuple[int, int], int, int]:
    """Count who holds the tensor ``owner.name``: its memory (aliases), the tensor (autograd), the object (Python)."""
    tensor = getattr(owner, name)
    counted = storage_holders(tensor)
    return counted, tensor._use_count(), sys.getrefcount(tensor)


def storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the tensors, storages, arrays and capsules that have the memory of ``tensor``; 2.11 - 2.13.

    The first number is of those that the memory knows, the second of who has its storage as an object of Python: that
    object is one, whoever asks for it. Numbers mean something only beside those of memory that is known to be alone.
    """
    storage = storage_of(tensor)
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


def _memory_of(storage: int) -> tuple[int, int, int]:
    """Return three words of a storage in C++: its memory, what will free that, and what it frees; 2.13.

    c10::StorageImpl begins with a table of methods and a count; then a c10::DataPtr. ``memory_owner`` checks that.
    """
    return tuple((ctypes.c_uint64 * 5).from_address(storage)[2:])  # type: ignore[return-value]


@functools.lru_cache
def _how_freed() -> tuple[int, int] | None:
    """Return what frees memory of torch's allocator on the CPU, and a part of another storage; None: cannot be told."""
    whole = torch.empty(64, device="cpu").untyped_storage()
    part = whole[:64]
    place, by_allocator, freed = _memory_of(whole._cdata)
    place_of_part, by_part, other = _memory_of(part._cdata)
    as_known = (place, freed, place_of_part, other) == (*[whole.data_ptr()] * 2, part.data_ptr(), whole._cdata)
    return (by_allocator, by_part) if as_known and by_allocator != by_part else None


def memory_owner(storage: torch.UntypedStorage) -> bool | int:
    """Say whether torch's allocator made the memory for ``storage`` alone; or of which storage it is a part; 2.13."""
    known = _how_freed()
    if known is None:
        return False
    place, by, other = _memory_of(storage._cdata)
    if by == known[1]:
        return other
    return by == known[0] and other == place


def holders_of_storage(key: int) -> tuple[int, int]:
    """Count who has a storage that exists, as ``storage_holders`` does: its parts, and tensors; 2.11 - 2.13."""
    storage = torch.UntypedStorage._new_with_weak_ptr(key)
    return int(torch._C._storage_Use_Count(key)), sys.getrefcount(storage)


def is_private_mapping(storage: torch.UntypedStorage) -> bool:
    """Say whether what is written in the file behind ``storage`` is this process's alone; False where unknown."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split()[:2] for line in maps]
    except OSError:
        return False
    place = storage.data_ptr()
    for span, rights in lines:
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= place < end:
            return rights.endswith("p") and place + storage.nbytes() <= end
    return False


def modules_with_accesses() -> tuple[types.ModuleType, ...]:
    """Return the modules whose functions give out memory or write it unseen, beside tensors' methods; 2.11 - 2.13."""
    return torch, torch.utils.dlpack, torch._C, torch._C._autograd


def never_compiled(function: Callable[..., Any]) -> None:
    """Have Dynamo run ``function``, and what that calls, as they are where it is not traced into; 2.11 - 2.13."""
    kinds: Any = torch._dynamo.types
    dynamo: Any = torch._dynamo.eval_frame
    code: types.CodeType = function.__code__
    dynamo.set_code_exec_strategy(code, kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP))


def forget_what_can_be_overridden() -> None:
    """Have torch look anew which of its functions ``__torch_function__`` is told of; 2.11 - 2.13.

    It keeps them by identity, in caches that may have been filled before one of them was replaced; so does Dynamo.
    """
    torch._dynamo.trace_rules.get_tensor_method.cache_clear()
    names = ("get_ignored_functions", "get_default_nowrap_functions", "get_testing_overrides",
             "_get_overridable_functions", "_get_tensor_methods")  # fmt: skip
    for name in names:
        getattr(getattr(torch.overrides, name, None), "cache_clear", int)()


def all_bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a tensor for which ``is_dense_fp32`` holds."""
    return ctypes.string_at(address_of(tensor), 4 * tensor.numel())


def is_dense_fp32(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is an ordinary fp32 one in the CPU's memory without gaps."""
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return kind and tensor.dtype == torch.float32 and tensor.is_contiguous()


def dispatch_has_kernel(op: OpOverload, key: str) -> bool:
    """Say whether ``op`` has a kernel registered for the dispatch key named ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def cpu_has_amx() -> bool:
    """Say whether this CPU has matrix units for bfloat16; False where torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())  # 2.11 - 2.13


def cpu_has_bf16() -> bool:
    """Say whether this CPU computes dot products of bfloat16; False where torch cannot tell."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # 2.11 - 2.13


_SERIAL = itertools.count()


def own_code_object(function: types.FunctionType) -> types.FunctionType:
    """Return ``function`` with a code object of its own.

    Dynamo's cache hangs on the code object, which is shared by every closure of one ``def``: without this,
    models converted one after the other fill each other's cache.
    """
    # The name is part of the key under which Dynamo remembers which sizes were seen to change.
    name = f"{function.__name__}_{next(_SERIAL)}"
    return types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _said_once() -> set[Any]:
    """Return the logging methods of transformers that speak once a process: no reason to break a graph."""
    names = ("warning_once", "info_once", "warning_advice")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


class _AsWord(str):
    """A set of functions that is a word to JSON: torch 2.11 and 2.12 log an error where they cannot write settings."""

    functions: set[Any]

    def __new__(cls, functions: set[Any]) -> _AsWord:
        made = super().__new__(cls, "logging functions")
        made.functions = functions
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


def _ignored_logging() -> Any:
    """Return the logging functions that break no graph: the user's choice, and those that speak once a process."""
    # A capture inside of a capture finds a word where settings are not of 2.13.
    functions = {*dynamo_config.ignore_logging_functions, *_said_once()}
    return functions if _torch_version() >= (2, 13) else _AsWord(functions)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


DTYPE_READ = "amp_dtype_read"  # meta key of a node: the code that was captured read the dtype of its value


def _record_reads_of_dtype() -> None:
    """Let Dynamo mark the node of each tensor whose ``dtype`` the code reads; 2.11 - 2.13. Nothing else changes."""
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


class _Capturing(threading.local):
    """Whether this thread captures for us."""

    is_on = False


_capturing = _Capturing()


def _leave_out_guard_timing() -> None:
    """Let Dynamo not time the guards of our captures; 2.11 - 2.13.

    It empties the caches of the processor first: 26 ms of a capture's half second, for a line in a log.
    """
    guards: Any = torch._dynamo.guards
    plain = guards.profile_guard_manager
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def profile_guard_manager(*args: Any) -> float:
        return 0.0 if _capturing.is_on else plain(*args)

    guards.profile_guard_manager = profile_guard_manager


def _leave_cast_cache_alone() -> None:
    """Let Dynamo's tries of operations on fake tensors not look for casts of weights where autocast keeps them.

    It calls operators with Python's lock held (its dispatcher is one in Python), under which autocast would wait for
    the lock of its cache. A thread that leaves autocast has that one, and wants Python's to free what was kept: the two
    wait for ever. torch/_dynamo/utils.py, 2.11 - 2.13.
    """
    utils: Any = torch._dynamo.utils
    plain = utils.run_node
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def run_node(*args: Any, **kwargs: Any) -> Any:
        if not (_capturing.is_on and torch.is_autocast_cache_enabled()):
            return plain(*args, **kwargs)
        torch.set_autocast_cache_enabled(False)
        try:
            return plain(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(True)

    utils.run_node = run_node


def _let_masks_broadcast() -> None:
    """Let ``torch.masked_select`` of our captures have as many elements as its operands have together; 2.11 - 2.13.

    torch/_subclasses/fake_impls.py bounds them by those of the tensor alone, which Dynamo asserts in the graph: a
    mask that is larger than its tensor fails there.
    """
    known: Any = torch._subclasses.fake_impls.op_implementations_dict
    operator = torch.ops.aten.masked_select.default
    plain = known[operator]
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def masked_select(mode: Any, func: Any, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
        if _capturing.is_on:
            tensor, mask = torch.broadcast_tensors(tensor, mask)
        return plain(mode, func, tensor, mask)

    known[operator] = masked_select


def _see_loops_to_their_end() -> None:
    """Let our captures see that they stop at a jump that goes back itself, as that of a ``while``; 2.11 - 2.13.

    Dynamo looks for one behind it alone, and takes the turns of such a loop for calls inside of each other: a thousand
    end in a RecursionError, and each holds its values. A frame with a loop that is seen runs as it is written.
    """
    translator: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
    plain: Any = getattr(translator, "maybe_has_backedge", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def maybe_has_backedge(self: Any) -> bool:
        jump = self.current_instruction
        target = getattr(jump.target, "offset", None) if _capturing.is_on else None
        return plain(self) or (target is not None and target < jump.offset)

    translator.maybe_has_backedge = maybe_has_backedge


# Functions, and what our captures hold in their place: always, or only where a number is given that tensors hold.
_OTHERWISE: dict[Any, tuple[Callable[..., Any], bool]] = {
    transformer._detect_is_causal_mask: (mask_as_given, False),  # 2.11 - 2.13
    torch.nn.functional.batch_norm: (batch_norm_of_averages, True),
}


def _capture_some_otherwise() -> None:
    """Let Dynamo put other functions in the place of some, as if they were written there; 2.11 - 2.13.

    In our captures alone: ``torch.compiler.substitute_in_graph`` would hold for those of others, too.
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
        if _capturing.is_on and (found := _OTHERWISE.get(function_of(self))) is not None:
            instead, numbers_of_tensors = found
            if not numbers_of_tensors or any(map(_is_number_of_tensor, (*args, *kwargs.values()))):
                return written(instead).call_function(tx, args, kwargs)
        return plain(self, tx, args, kwargs)

    call_function.asks_amp_graph = True  # type: ignore[attr-defined]
    kind.call_function = call_function


def _is_number_of_tensor(variable: Any) -> bool:
    number = getattr(variable, "sym_num", None)
    return number is not None and bool(free_unbacked_symbols(number))


def _with_room(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with a piece of Python's stack before it that holds all the calls inside.

    The interpreter maps that stack in pieces of 16 KB, and unmaps each when the call that opened it returns: where
    Dynamo's recursion comes and goes over such an edge, 9,800 times in a small BERT's capture, for a tenth of its time.
    A frame that is larger than a piece is given one of its own, of twice its size at most: the rest is for others.
    """
    return function(*args, **kwargs)


if sys.version_info >= (3, 11):  # before, each frame has memory of its own
    _with_room.__code__ = _with_room.__code__.replace(co_stacksize=70_000)  # in words: 0.55 MB, of 1 MB that are mapped


class CaptureListener:
    """Hears of what Dynamo captured and did not; this one does nothing.

    What ``begins`` and ``ended`` raise reaches the caller: nothing of the frame has run by then, and Dynamo remembers
    nothing of it.
    """

    def begins(self, code: types.CodeType) -> None:
        """Hear that a frame will be captured, for which there was no compiled code."""

    def ended(self, code: types.CodeType, whole: bool) -> None:
        """Hear that a frame was captured: ``whole``, as one graph, or not."""

    def failed(self, code: types.CodeType, error: Exception) -> bool:
        """Hear that tracing a frame failed; say whether the frame is to run as it was written."""
        return False

    def skipped(self, code: types.CodeType, reason: str) -> None:
        """Hear that a frame runs as it was written."""

    def broke(self, reason: str, stack: Any) -> None:
        """Hear that a graph ended before its frame did."""


class CaptureChoice:
    """Chooses whether a frame is captured once more, and with which of Dynamo's settings; this one always does."""

    def settings(self, frame: Any) -> dict[str, Any] | None:
        """Return settings for the capture of ``frame`` that begins, or None for none: it runs as it is written.

        What is raised reaches the caller, before anything of the frame has run.
        """
        return {}

    def made(self, frame: Any) -> None:
        """Hear that the capture of ``frame`` gave compiled code."""


# Makes symbolic what an integer of a module is that was seen to change, as Dynamo does for arguments; 2.11 - 2.13.
CHANGING_INTS: dict[str, Any] = {"allow_unspec_int_on_nn_module": True}


def failed_guards(frame: Any) -> list[tuple[str, Any]]:
    """Return for each compiled code of ``frame`` the first guard that refuses it, and the stack that it is from.

    "L['x'].calls == 1   # self.calls += 1  # model.py:7 in forward", as Dynamo tells it; 2.11 - 2.13.
    """
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    found = []
    for entry in entries(frame.f_code) if entries is not None else ():
        try:
            info = entry.guard_manager.check_verbose(frame.f_locals)
            parts = [] if info.result else list(info.verbose_code_parts)
            if len(parts) > 1:  # the guards on sizes, which are checked as one
                parts = [part for part in parts if _is_false(part, entry.guard_manager, frame.f_locals)]
        except Exception:  # what a guard looks at may be gone: there is nothing to tell then
            continue
        found += [(part, getattr(info, "user_stack", None)) for part in parts[:1]]
    return found


def is_remembered(code: types.CodeType) -> bool:
    """Say whether Dynamo has met ``code`` since ``torch._dynamo.reset()`` was last called; 2.11 - 2.13."""
    return code in torch._dynamo.convert_frame.input_codes


def _is_false(part: str, manager: Any, local: dict[str, Any]) -> bool:
    """Say whether one of Dynamo's guards refuses these locals."""
    scope = {"L": local, "G": manager.global_scope["G"], **manager.closure_vars}
    return not eval(part, dict(manager.global_scope), scope)


# Marks in profiles of what runs before a graph: two calls into Python for each call of the model.
_NO_RECORDS: dict[str, Any] = (
    {"record_runtime_overhead": False} if hasattr(dynamo_config, "record_runtime_overhead") else {}
)


# Before 2.13 guards look at no parameter anew while no module was assigned to: not at one that was frozen, or brought
# into another layout or precision.
_TAGS = ("use_recursive_dict_tags_for_guards", "skip_tensor_guards_with_matching_dict_tags")
_NO_TAGS: dict[str, Any] = dict.fromkeys(_TAGS, False) if _torch_version() < (2, 13) else {}


# What is raised of Dynamo's own tracing, where running the code might not be: by fake tensors, by sizes without a
# number, by a mark of a dynamic size that does not hold. What is raised otherwise is a backend's, or asked for by a
# setting of Dynamo's; 2.11 - 2.13.
_TRACING_FAILED = (
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.InternalTorchDynamoError,
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.UserError,
    torch._dynamo.exc.UncapturedHigherOrderOpError,
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ValidationException,
    AssertionError,  # of the conversion to fake tensors
    IndexError,  # of a dimension out of range
)


# Before 2.13 Dynamo's settings are those of all threads: the later of two captures would restore the earlier one's.
_ONE_AT_A_TIME: contextlib.AbstractContextManager[Any] = (
    contextlib.nullcontext() if _torch_version() >= (2, 13) else threading.RLock()
)


_CAPTURES: list[None] = []  # one for each capture of ours that runs, in whatever thread


def a_capture_runs() -> bool:
    """Say whether some thread captures a converted model: it has aliases of the model's parameters meanwhile."""
    return bool(_CAPTURES)


class _CompileTimeConfig:
    """A Dynamo frame callback that sets Dynamo's limits while it compiles, and only then.

    Setting them globally would change the user's own ``torch.compile``; setting them around each call
    would cost every step.
    """

    def __init__(self, inner: Any, heard: CaptureListener, collector_waits: bool, choice: CaptureChoice) -> None:
        self._inner = inner
        self._heard = heard
        self._choice = choice
        self._collector_waits = collector_waits
        # Read by Dynamo's C++ side to find the backend of a cache entry: must be a plain attribute.
        self._torchdynamo_orig_backend = inner
        self.hooks = inner.hooks

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        known = len(break_reasons())
        chosen = self._choice.settings(frame)
        if chosen is None:
            return _as_written_once()
        self._heard.begins(frame.f_code)
        with (
            _ONE_AT_A_TIME,
            collector_waits(self._collector_waits),
            dynamo_config.patch(
                allow_rnn=True,
                # Boolean masks and .item() become graph nodes instead of graph breaks (which, inside a Python
                # loop, would lose the whole frame).
                capture_dynamic_output_shape_ops=True,
                capture_scalar_outputs=True,
                # A hook that is registered later must fire; Dynamo does not look, for speed. Costs nothing measurable.
                skip_nnmodule_hook_guards=False,
                ignore_logging_functions=_ignored_logging(),
                recompile_limit=NO_LIMIT,
                accumulated_recompile_limit=NO_LIMIT,
                **_NO_RECORDS,
                **_NO_TAGS,
                **chosen,
            ),
        ):
            outer, _capturing.is_on = _capturing.is_on, True
            _CAPTURES.append(None)
            try:
                result = _with_room(self._inner, frame, *args, **kwargs)
            except _TRACING_FAILED as error:
                if not self._heard.failed(frame.f_code, error):
                    raise
                return torch._dynamo.types.ConvertFrameReturn()  # the frame runs as it was written, as any skipped one
            finally:
                _CAPTURES.pop()
                _capturing.is_on = outer
        for reason in break_reasons()[known:]:
            self._heard.broke(str(reason.reason), reason.user_stack)
        made = getattr(result, "guarded_code", None)
        if made is not None:
            self._choice.made(frame)
        else:
            self._heard.skipped(frame.f_code, str(getattr(result, "skip_reason", None) or ""))
        self._heard.ended(frame.f_code, made is not None and _is_whole(made.code))
        return result


def _as_written_once() -> Any:
    """Return what has a frame run as it was written, this time, and what it calls on what is compiled; 2.11 - 2.13."""
    types_of: Any = torch._dynamo.types  # exports these names, but does not say so
    run = types_of.FrameExecStrategy(types_of.FrameAction.SKIP, types_of.FrameAction.RUN_ONLY)
    return types_of.ConvertFrameReturn(frame_exec_strategy=run, apply_to_code=False)


def capture_with_dynamo(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None,
    fullgraph: bool,
    heard: CaptureListener,
    collector_waits: bool,
    choice: CaptureChoice | None = None,
) -> Callable[..., Any]:
    """Return ``function`` captured by Dynamo into ``backend``; ``heard`` is told what was not captured.

    ``choice``: what is asked before each capture.
    ``collector_waits``: until Dynamo and ``backend`` are done, which is not for compilers that take minutes.
    2.13 has ``isolate_recompiles`` (entries of one region never count against another's); 2.11 and 2.12
    rely on the raised limits and on the code object of its own.
    """
    _record_reads_of_dtype()
    _capture_some_otherwise()
    _leave_out_guard_timing()
    _leave_cast_cache_alone()
    _let_masks_broadcast()
    _see_loops_to_their_end()
    optimize = torch._dynamo.optimize
    known = inspect.signature(torch._dynamo.eval_frame._optimize).parameters
    extra = {"isolate_recompiles": True} if "isolate_recompiles" in known else {}
    context: Any = optimize(backend, nopython=fullgraph, dynamic=dynamic, **extra)
    context.callback = _CompileTimeConfig(context.callback, heard, collector_waits, choice or CaptureChoice())
    return context(function)


Find = Callable[[dict[str, Any]], Callable[..., Any] | None]


@contextlib.contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Keep other threads from capturing while a graph is traced outside of Dynamo, which patches modules for all.

    And let them call what was captured: by ``is_compiling`` torch tells a trace from ``fx.symbolic_trace``, amid which
    Dynamo refuses to be called, in any thread. torch/fx/_symbolic_trace.py, torch/compiler/__init__.py; 2.11 - 2.13.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def compiled_frames(function: types.FunctionType, *, has_backward: bool = True) -> Find:
    """Return what finds the code that Dynamo compiled ``function`` to, for locals that its guards accept, else None.

    Running it is what Dynamo's wrapper comes to in the end, after as much time as a small model's forward takes. Only
    whole frames are found: what goes on behind a graph break must run under the wrapper. ``find({name: value})``
    wants all arguments and free variables; nothing is found while ``torch.compiler.set_stance`` is in force, or, for
    what ``has_backward``, compiled autograd. 2.13.
    """
    frame, code = torch._dynamo.eval_frame, function.__code__
    calls = torch._dynamo.mutation_guard.GenerationTracker
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    switch: Any = torch._C  # of torch functions
    compiles_autograd = _reader_of("compiled_autograd")
    seen: dict[int, tuple[weakref.ref[types.CodeType], bool]] = {}  # whether a code is a whole frame

    def find(local: dict[str, Any]) -> Callable[..., Any] | None:
        stance = frame._stance
        if stance.stance != "default" or stance.backend is not None:
            return None
        if has_backward and compiles_autograd() is True:
            return None
        before = switch._get_torch_function_state()
        for entry in entries(code):
            try:
                fits = entry.guard_manager.check(local)
            except RuntimeError:  # the check switches torch functions off, and where it raises, leaves them so
                switch._set_torch_function_state(before)
                raise
            if fits:
                compiled = entry.code
                known = seen.get(id(compiled))
                if known is None or known[0]() is not compiled:  # held weakly: with it goes what was compiled
                    known = seen[id(compiled)] = (weakref.ref(compiled), _is_whole(compiled))
                if not known[1]:
                    return None
                calls.generation += 1  # CUDA graphs tell calls apart by it
                return types.FunctionType(compiled, function.__globals__, code.co_name, None, function.__closure__)
        return None

    return find if entries is not None and hasattr(frame, "_stance") else lambda local: None


def _reader_of(setting: str) -> Callable[[], Any]:
    """Return what reads a setting of Dynamo's for this thread: by its module it takes 10 us amid a step, guards 40.

    Since 2.13 what is set is a context variable, which has a mark of its own where nothing is.
    """
    asked: Any = getattr(dynamo_config, "_config", {}).get(setting)
    given = getattr(asked, "user_override", None)
    if isinstance(given, contextvars.ContextVar) and not getattr(dynamo_config, setting):
        return given.get
    return lambda: getattr(dynamo_config, setting)


def _is_whole(compiled: types.CodeType) -> bool:
    """Say whether code that Dynamo made calls one graph, and no code behind a graph break."""
    graphs = [name for name in compiled.co_names if name.startswith("__compiled_fn")]
    return len(graphs) == 1 and not any("resume" in name for name in compiled.co_names)


def dispatched(operator: Any) -> Callable[..., Any]:
    """Return the dispatcher's function of an operator overload, which is all that calling that calls. 2.11 - 2.13."""
    plain = type(operator) is torch._ops.OpOverload
    found: Callable[..., Any] = getattr(operator, "_op", operator) if plain else operator
    return found


def plain_forward(gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return the generated function of ``gm`` as it is: ``gm.forward`` of a graph that Dynamo made goes a long way."""
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
    forward: Callable[..., Any] = gm.forward
    return forward


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a bound method without keeping its object alive.

    What Dynamo compiled stays in the globals of a module for as long as the code object of the captured function: if
    it held that function's owner, neither would ever be freed.
    """
    bound = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = bound()
        assert found is not None, "a captured graph outlived its owner, through which alone it is called"
        return found(*args, **kwargs)

    return call


dynamo_listens = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None where no compiler does; 2.11 - 2.13


def outside_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an outer ``torch.compile`` from tracing into ``function``; return what runs it, and what it calls, without.

    What ``function`` captures itself it captures as ever: the outer compiler would otherwise inline it. ``function`` is
    marked, not wrapped, as one call more is seen in small models: it is to call what is returned where
    ``dynamo_listens`` is not None, and is then called again with nobody listening.
    """
    disabled = torch._dynamo.disable(function, reason="a converted model captures itself, as a graph of its own")
    vars(function).update({k: v for k, v in vars(disabled).items() if k.startswith("_torchdynamo_disable")})
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return disabled


def not_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which Dynamo runs as it is where it is called, and may still trace into from a caller."""
    code: types.CodeType = function.__code__
    torch._dynamo.eval_frame.skip_code(code)
    return function


def undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``torch._dynamo.disable`` was given to return ``function``, for callers that Dynamo is off in."""
    found: Callable[..., Any] = torch._dynamo.eval_frame.innermost_fn(function)
    return found


# Looked up once: every call of a converted model asks; 2.11 - 2.13.
_tracing_state, _compiler = torch._C._get_tracing_state, torch.compiler


def being_traced() -> bool:
    """Say whether ``torch.jit.trace`` or ``torch.export`` is recording what is called now."""
    return _tracing_state() is not None or _compiler._is_exporting_flag


def refused_under_fx(error: RuntimeError) -> bool:
    """Say whether Dynamo refused a call amid ``torch.fx.symbolic_trace`` or ``make_fx``; eval_frame.py, 2.11 - 2.13."""
    return "FX to symbolically trace" in str(error)


def wait_for_traces_of_others() -> bool:
    """Wait until no other thread traces with torch.fx, whose flag is one for all; False where this one does.

    torch/fx/_symbolic_trace.py, 2.11 - 2.13.
    """
    trace = _symbolic_trace.Tracer.trace.__code__
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is trace:
            return False
        frame = frame.f_back
    while _symbolic_trace._is_fx_tracing_flag:
        time.sleep(1e-3)
    return True


def tensor_guard(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return what says, in one call of C++, whether a tensor is as ``tensor``, a plain one; 2.11 - 2.13.

    As it is: type, dtype, device, sizes, strides, and what the dispatcher sees: autocast on its kind of device,
    tracing, functorch's transforms, dispatch modes, inference mode. It is not to be given a nested tensor of the
    strided layout: that has no strides, and the error ends the process.
    """
    guard_of: Any = torch._C._dynamo.guards.TensorGuards  # its stub names other arguments
    guard = guard_of(tensor, dynamic_dims_sizes=[list(tensor.shape)], dynamic_dims_strides=[list(tensor.stride())])
    check: Callable[[torch.Tensor], bool] = guard.check
    return check


def is_batched(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is a batch of tensors under ``vmap``, which in-place operations may not widen."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def stream_of(tensor: torch.Tensor) -> int | None:
    """Return which stream work on ``tensor`` goes to now, 0 without streams; None while a CUDA graph is recorded."""
    if tensor.device.type != "cuda":
        return 0
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    found: int = torch._C._cuda_getCurrentRawStream(tensor.device.index)
    return found


def unflatten(piece: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a one-dimensional ``piece``, one behind the other, of the shapes of ``like``; 2.11 - 2.13."""
    return list(torch._C._nn.unflatten_dense_tensors(piece, like))


def in_forward_mode() -> bool:
    """Say whether forward-mode differentiation is on, which functions with a backward of their own do not know."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether ``torch.autocast`` is in force on any device, in a tenth of the time of asking two of them; 2.11 - 2.13.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def parameters_as_inputs() -> contextlib.AbstractContextManager[None]:
    """Have Dynamo capture parameters as inputs, where Inductor's freezing would make constants of them; 2.11 - 2.13."""
    if not inductor_config.freezing or torch.is_grad_enabled():
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[None] = inductor_config.patch(freezing=False)
    return found


def in_transform() -> bool:
    """Say whether a transform of ``torch.func`` is running: Dynamo captures nothing inside, and never again there."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mode_without_capture() -> str:
    """Return the name of a dispatch mode that a user has switched on, under which Dynamo captures nothing; "" for none.

    FLOP counters and memory trackers are such modes. Dynamo would give up the frames that it meets there for good.
    """
    if not torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return ""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return type(modes[-1]).__name__ if modes else ""


def is_seen(tensor: torch.Tensor) -> bool:
    """Say whether somebody is to see the operators that are called on ``tensor``: a tracer, a counter, a profiler."""
    return torch._C._autograd._profiler_enabled() or is_in_mode(tensor)


def is_in_mode(tensor: torch.Tensor) -> bool:
    """Say whether what is called on ``tensor`` goes to somebody who need not compute it: a tracer, a counter."""
    return type(tensor) not in PLAIN or torch._C._len_torch_dispatch_stack() > 0


def is_recorded(tensor: torch.Tensor) -> bool:
    """Say whether what is called on ``tensor`` becomes a graph; not where somebody counts it; 2.11 - 2.13."""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return type(tensor) not in PLAIN or proxy is not None


def is_wrapper(given: Any) -> bool:
    """Say whether ``given`` is a tensor that stands for others, which only torch's own operations know to handle."""
    return type(given) not in PLAIN and is_traceable_wrapper_subclass(given)


def allow_in_graph(function: type) -> None:
    """Let Dynamo put calls of an ``autograd.Function`` into graphs as they are, instead of tracing into them."""
    torch._dynamo.allow_in_graph(function)


def break_reasons() -> list[Any]:
    """Return the list to which Dynamo appends the reason of every graph break, graphs without nodes included."""
    return torch._dynamo.utils.graph_break_reasons


def compiled_in_place(module: torch.nn.Module) -> bool:
    """Say whether ``nn.Module.compile`` put a compiled call in front of ``module``."""
    return module.__dict__.get("_compiled_call_impl") is not None


def with_parameters(module: torch.nn.Module, instead: dict[str, torch.Tensor]) -> Any:
    """Return a context in which ``module`` has these tensors as parameters, ties included; Dynamo traces it.

    torch.nn.utils.stateless; 2.11 to 2.13. ``torch.func.functional_call`` would run the module's hooks, too.
    ``stack_weights``: what is put back is put back in the reverse order. A module that is registered under two names
    has each of its parameters swapped twice, and would keep what the first swap put there.
    """
    return _reparametrize_module(module, instead, tie_weights=True, stack_weights=True)


_ON_STEP: set[Callable[..., None]] = set()


def on_every_optimizer_step(after: Callable[..., None], before: Callable[..., None] | None = None) -> None:
    """Call ``before(optimizer, args, kwargs)`` and ``after(...)`` around ``step()`` of all torch optimizers."""
    if after not in _ON_STEP:
        _ON_STEP.add(after)
        register_optimizer_step_post_hook(after)
        if before is not None:
            register_optimizer_step_pre_hook(before)


def steps_otherwise(optimizer: torch.optim.Optimizer) -> str:
    """Say what ``optimizer.step()`` does beside what its class does, or "": hooks, and what stands in its place.

    A scheduler puts a ``step`` of its own there, which only counts. torch/optim/optimizer.py, lr_scheduler.py; 2.11 to
    2.13.
    """
    own = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    every = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    if own or any(not str(getattr(hook, "__module__", "")).startswith("amp_graph.") for hook in every):
        return "hooks of its step()"
    step: Any = optimizer.__dict__.get("step")
    behind = step.__wrapped__ if hasattr(step, "_wrapped_by_lr_sched") else getattr(step, "__func__", step)
    return "" if behind in (None, type(optimizer).step) else "a step() that was put in the place of its own"


def plain_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``kind.step`` without the hooks that ``Optimizer.__init__`` puts around it for good; 2.11 to 2.13."""
    step: Any = kind.step
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def load_optimizer_states_as(stand_in: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Let ``Optimizer.load_state_dict`` give states the dtype of ``stand_in(parameter)``, where that is a tensor.

    torch/optim/optimizer.py casts them to the parameter's; 2.11 to 2.13.
    """
    plain = torch.optim.Optimizer._process_value_according_to_param_policy
    if getattr(plain, "stand_in", None) is stand_in:
        return

    def cast_state(param: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = stand_in(param)
        return plain(param if found is None else found, *args, **kwargs)

    cast_state.stand_in = stand_in  # type: ignore[attr-defined]
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(cast_state)  # type: ignore[method-assign]


def is_sharded(module: torch.nn.Module) -> bool:
    """Say whether ``fully_shard`` was applied to this very module; 2.11 to 2.13, without importing FSDP."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def multiplies_bf16() -> bool:
    """Say whether the CPU has instructions that multiply bf16: dot products of AVX-512, or matrix units."""
    return cpu_has_bf16() or cpu_has_amx()


def flash_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """Return what ``F.scaled_dot_product_attention`` computes by its flash kernel for CPU; 2.11 - 2.13."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]


def pack_linear_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` [outputs, inputs] in the layout of oneDNN's products, which alone can read it; 2.11 - 2.13."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


# Called as (x, weight, bias, "none" or what comes behind, [], its form); 2.11 - 2.13. A "relu" makes 0 of NaN.
linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_linear_pointwise = linear_pointwise._op if linear_pointwise is not None else None


def linear_of_packed_weight(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, after: str = "none", form: str = ""
) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)`` for the ``weight`` that was packed, through oneDNN's ``after``; 2.11 - 2.13.

    after: "none", "relu", which makes 0 of NaN, "swish" or "gelu", the last in the ``form`` "none" or "tanh".
    """
    assert _linear_pointwise is not None, "nothing is packed without oneDNN"
    found: torch.Tensor = _linear_pointwise(x, packed, bias, after, [], form)
    return found


def pack_convolution_weight(weight: torch.Tensor, shape: Any, images: torch.Size) -> torch.Tensor:
    """Return a 2d convolution's ``weight`` in the layout of oneDNN, best for ``images`` of that size; 2.11 - 2.13."""
    pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    packed: torch.Tensor = pack(weight.to_mkldnn(), *where, list(images))
    return packed


_convolution_pointwise = torch.ops.mkldnn._convolution_pointwise if torch.backends.mkldnn.is_available() else None
_convolution_into = torch.ops.mkldnn._convolution_pointwise_.binary._op if _convolution_pointwise is not None else None


def convolution_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    shape: Any,
    other: torch.Tensor | None,
    into: bool = False,
    activation: str = "none",
) -> torch.Tensor:
    """Return ``conv2d(x, weight, bias)``, plus ``other``, through ``activation``; 2.11 - 2.13.

    x, other: bf16, channels_last; weight: packed; bias: fp32, and bf16 with ``other``, whose kernel takes no other.
    ``into``: the result is written over ``other``, bit for bit the same. activation: what the kernel applies to its
    fp32 sums, "none", "relu", which makes 0 of NaN, or, without ``other``, "swish" or "hardswish".
    """
    assert _convolution_pointwise is not None, "nothing is folded without oneDNN"
    assert _convolution_into is not None, "nothing is folded without oneDNN"
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    found: torch.Tensor
    if other is None:
        found = _convolution_pointwise.default._op(x, weight, bias, *where, activation, [], "")
    else:
        after: tuple[Any, ...] = ("add", 1.0, None if activation == "none" else activation, [], None)
        kernel, given = (_convolution_into, (other, x)) if into else (_convolution_pointwise.binary._op, (x, other))
        found = kernel(*given, weight, bias, *where, *after)
    return found


def keeps_lstm_workspaces() -> bool:
    """Say whether what oneDNN's LSTM leaves for its backward survives a compiler: in 2.11 gradients were garbage."""
    return _torch_version() >= (2, 13)


def takes_kernels_of_ours() -> bool:
    """Say whether Inductor's code generation is as ``product_kernel.py`` goes by: 2.13 was tried."""
    return _torch_version() >= (2, 13)


def softmax_backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a softmax's input over the last dimension; 2.11 - 2.13."""
    return torch._softmax_backward_data(grad, result, -1, result.dtype)


def outer_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return (pack, unpack) of the ``saved_tensors_hooks`` in force, which inner ones replace; 2.11 - 2.13."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def saved_tensors_hooks_are_enabled() -> bool:
    """Say whether hooks of saved tensors may be set: not inside of transforms of ``torch.func``; 2.11 - 2.13."""
    autograd: Any = torch._C._autograd
    return bool(autograd._saved_tensors_hooks_is_enabled())


_SUMS = ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
_HOW_FP16, _HOW_BF16, _IN_FP16 = (getattr(torch._C, f"_get_cublas_allow_{name}") for name in _SUMS)
_SET_FP16, _SET_BF16, _SET_IN_FP16 = (getattr(torch._C, f"_set_cublas_allow_{name}") for name in _SUMS)


def sums_of_products() -> tuple[Any, ...]:
    """Return how cuBLAS may add up products: those of fp16, those of bf16, and whether fp16's in fp16; 2.11 - 2.13.

    Of the first two (whether parts of a sum may be rounded before they are added up, whether a sum may have parts).
    """
    return _HOW_FP16(), _HOW_BF16(), _IN_FP16()


def set_sums_of_products(settings: tuple[Any, ...]) -> None:
    """Set what ``sums_of_products`` returns; 2.11 - 2.13."""
    fp16, bf16, in_fp16 = settings
    _SET_FP16(*fp16)
    _SET_BF16(*bf16)
    _SET_IN_FP16(in_fp16)


def number_of_backward() -> int:
    """Return the number of the backward pass that calls this, as a hook; below 0 outside of any; 2.11 - 2.13."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward pass is done that calls this, as a hook; 2.11 - 2.13.

    Not where it raises.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


class ModesOfThread:
    """Modes of this thread that a graph may switch, as they are now, to restore where the graph raises; 2.11 - 2.13.

    A graph holds both ends of the user's regions (``no_grad``, ``autocast``, ``vmap``) as nodes: what raises between
    them leaves the mode on.
    """

    def __init__(self) -> None:
        """Read them."""
        self.grad = torch.is_grad_enabled()
        self.autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
        self.is_caching = torch.is_autocast_cache_enabled()
        self.regions = _open_autocast_regions()
        self.depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self.no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self) -> None:
        """Switch them back."""
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self.depth)
        for device, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.is_caching)
        while _open_autocast_regions() > self.regions:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)
        if self.no_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(self.no_hooks)


def _open_autocast_regions() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1
