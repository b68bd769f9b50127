"""Autograd: its engine, its hooks, and where functions with a backward of their own fall back to torch; private names.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import autograd_function_apply as autograd_function_apply  # 2.11 - 2.13
from torch.autograd.function import BackwardCFunction  # 2.11 - 2.13; public, but in no list of its module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.11 - 2.13
from torch.utils._pytree import tree_leaves

from amp_graph.passes.torch_compat.dispatch import dispatched, in_forward_mode, in_transform, is_batched, is_wrapper
from amp_graph.passes.torch_compat.fake import FakeTensor
from amp_graph.passes.torch_compat.operators import UNSAFE_VIEW

# C++ backward formulas that use sizes or strides only to choose between two ways to the same gradient: how the operands
# of a matmul are laid out, or that a sum of one element is that element. torch/csrc/autograd/FunctionsManual.cpp, 2.11
# - 2.13.
ANY_BRANCH = frozenset(
    f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Cumsum", "LinearBackward")
)


@contextlib.contextmanager
def any_branch_of_backward(traced: torch.Tensor) -> Iterator[None]:
    """Let those formulas treat data-dependent sizes as large while the backward of ``traced`` is traced."""
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
    """Let autograd record inside an operator's kernel, where dispatch disables it; 2.11 to 2.13."""
    with _dispatch_to_autograd(enabled=True), torch.enable_grad():
        yield


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Have operators reach a dispatch mode whole: with autograd, ``linear`` arrives as ``t`` and ``addmm``."""
    return _dispatch_to_autograd(enabled=False)


@contextlib.contextmanager
def _dispatch_to_autograd(*, enabled: bool) -> Iterator[None]:
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        key = getattr(torch._C.DispatchKey, name)
        excluded = excluded.remove(key) if enabled else excluded.add(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


unsafe_view = dispatched(UNSAFE_VIEW)  # 2.11 - 2.13


def outer_saved_tensors_hooks() -> Any:
    """Return (pack, unpack) of the current ``saved_tensors_hooks``, which inner hooks would replace; 2.11 - 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def saved_tensors_hooks_are_enabled() -> bool:
    """Say whether saved-tensor hooks may be set: not inside ``torch.func`` transforms; 2.11 - 2.13."""
    autograd: Any = torch._C._autograd
    return bool(autograd._saved_tensors_hooks_is_enabled())


def number_of_backward() -> int:
    """Return the number of the backward pass that this thread is running; negative outside of any; 2.11 - 2.13."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Say whether this thread is running a backward pass, in which checkpoints call modules again."""
    return number_of_backward() >= 0


def next_sequence_number() -> int:
    """Return the number that the next node of autograd's graph gets in this thread; 2.11 - 2.13."""
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int:
    """Return the number of the node of autograd's graph whose backward runs; -1 outside of backward; 2.11 - 2.13."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else sequence_number(node)


def sequence_number(node: Any) -> int:
    """Return the number of a node of autograd's graph in the thread that made it; 2.11 - 2.13."""
    return int(node._sequence_nr())


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node of autograd's graph has saved, but those that a hook packed; 2.11 - 2.13.

    Nothing is unpacked: a hook may compute again what it did not keep.
    """
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            held = getattr(node, name)
            found = (one.data for one in (held if isinstance(held, (tuple, list)) else (held,)))
            yield from (t for t in found if isinstance(t, Tensor))


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the backward pass that runs this hook; 2.11 - 2.13.

    Not if that pass raises.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


# The node of torch.utils.checkpoint with use_reentrant=True, by name, on torch 2.11 to 2.13.
REENTRANT = "CheckpointFunctionBackward"


def add_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Have ``hook`` called with the gradient of ``tensor``, as ``register_hook`` does, which ends the process (2.13).

    It does so for a view of what was written to in place, unless its ``grad_fn``, which is then made anew, is read
    before.
    """
    _ = tensor.grad_fn
    tensor.register_hook(hook)


def hook_gradients(results: Any, hook: Callable[[Tensor], Any]) -> None:
    """Have ``hook`` called with the gradient of each tensor among the ``results`` of a graph that gets one."""
    for one in results if isinstance(results, (tuple, list)) else (results,):
        if isinstance(one, Tensor) and one.requires_grad:
            add_hook(one, hook)


def nodes_behind(starts: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the autograd nodes ``starts``, where they are not None, and those behind them, each once; not ``ends``."""
    seen = {None, *ends}
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [one for one, _ in node.next_functions]


def users_functions(results: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the autograd nodes of the user's ``autograd.Function``s between ``inputs`` and ``results``.

    ``node.apply`` of such a node is its backward, also if it is replaced in the node; 2.11 - 2.13.
    """
    if not any(map(_is_users, BackwardCFunction.__subclasses__())):  # torch makes a type of nodes for each Function
        return
    every = nodes_behind((t.grad_fn for t in results), (t.grad_fn for t in inputs))
    yield from (node for node in every if _is_users(type(node)))


def _is_users(node: type) -> bool:
    """Return whether nodes of this type are made by an ``autograd.Function`` of neither torch nor amp_graph."""
    made_by = getattr(node, "_forward_cls", None)
    return made_by is not None and made_by.__module__.partition(".")[0] not in ("torch", "amp_graph")


def keeps_graph() -> bool:
    """Say whether the running backward keeps its graph (``retain_graph=True``); 2.11 - 2.13."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def what_watches_calls() -> str:
    """Return what is on that has to see each operation, or each saved tensor, of a call; "" for nothing; 2.11 - 2.13.

    A recording runs no operation that could be seen.
    """
    if torch.is_anomaly_enabled():
        return "anomaly mode"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode"
    if in_transform() or in_forward_mode() or not saved_tensors_hooks_are_enabled():
        return "a function transform"
    if outer_saved_tensors_hooks() is not None:
        return "saved-tensor hooks"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "another CUDA graph's recording"
    return ""


def leaves_to_torch(*given: Tensor | None) -> bool:
    """Say whether a forward on ``given`` must use torch's own operations.

    That is so inside ``torch.func`` transforms, in forward-mode differentiation, and for tensors without memory of
    their own: those of ``vmap``, and wrapper subclasses.
    """
    if in_transform() or in_forward_mode():
        return True
    return any(t is not None and (is_batched(t) or is_wrapper(t)) for t in given)


def is_plain(*grads: Tensor | None) -> bool:
    """Say whether a backward of ``grads`` must use torch's own operations.

    That is so if they are differentiated again (``create_graph=True``), or are batched (``is_grads_batched=True``).
    """
    return torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in grads)


def gradients_by_torch(
    function: Callable[..., Any], given: Sequence[Any], need: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of ``function(*given)`` for those of ``given`` that ``need`` them, None for the others.

    Uses torch's own operations, given the gradients ``grads`` of the results; builds a graph if gradients are recorded.
    Each of ``given`` counts separately, even if two are the same tensor.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [_alone(t) if needed else t for t, needed in zip(given, need, strict=True)]
        results = [r for r in tree_leaves(function(*apart)) if isinstance(r, Tensor)]
        pairs = [(r, g) for r, g in zip(results, grads, strict=False) if g is not None and r.requires_grad]
        wanted = [t for t, needed in zip(apart, need, strict=True) if needed]
        outs, seeds = [r for r, _ in pairs], [g.to(r.dtype) for r, g in pairs]
        found = iter(torch.autograd.grad(outs, wanted, seeds, create_graph=again, allow_unused=True))
    return [next(found) if needed else None for needed in need]


def _alone(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as an alias if gradients go through it, else as a detached leaf that requires them."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
