"""Runs the batches of a user, each checked: its structure, a loss that is finite in fp32, and their gradients.

A batch is what ``TrainStep`` takes: ``(inputs, *targets)`` with a loss function, which is called as
``loss_fn(model(inputs), *targets)``; without one, the arguments of a model that may return its loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from amp_graph.errors import AmpGraphError, CalibrationError
from amp_graph.lists.errors import shortened
from amp_graph.passes.torch_compat.autograd import REENTRANT
from amp_graph.step.step_arguments import call_model, loss_of

LossFn = Callable[..., Any]
PLAIN = (int, float, complex, str, bytes, type(None))  # what holds no tensor


def checked(caller: str, batches: Iterable[Any], progress: bool = False) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each batch with its number, as a tuple.

    Raises CalibrationError if there is none, or one whose structure, dtypes or dimensions are not those of the first.
    """
    if isinstance(batches, (Tensor, str, dict)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{caller}: a {type(batches).__name__} is no iterable of batches\n  legal: a list, a DataLoader\n"
            f"  fix:   amp_graph.{caller}(model, [batch])"
        )
    first: Any = None
    count = 0
    for number, batch in enumerate(shown(caller, batches) if progress else batches):
        found = _structure(batch)
        first = found if number == 0 else first
        if found != first:
            raise CalibrationError(
                f"{caller}: batch {number} has another structure than batch 0: {found} instead of {first}\n"
                "  legal: batches of one structure, with the dtypes and numbers of dimensions of the first\n"
                f"  fix:   one call of amp_graph.{caller} for each kind of batch"
            )
        count = number + 1
        yield number, parts_of(f"{caller}: batch {number}", batch, f"amp_graph.{caller}(model, [(x, y)], loss_fn)")
    if not count:
        raise CalibrationError(
            f"{caller}: there are no batches\n  legal: at least one; a generator can be used once only\n"
            f"  fix:   amp_graph.{caller}(model, list(batches))"
        )


def _structure(batch: Any) -> str:
    """Return the structure of a batch as text: ``(float32[2d], int64[1d])``."""
    leaves, spec = tree_flatten(list(batch) if isinstance(batch, tuple) else batch)
    told = [
        f"{str(leaf.dtype).removeprefix('torch.')}[{leaf.dim()}d]" if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ]
    keys = sorted(map(str, batch)) if isinstance(batch, dict) else []
    kind = type(batch).__name__ if not isinstance(batch, (tuple, list)) else ""
    return f"{kind}({', '.join(told)}){' with ' + ', '.join(keys) if keys else ''}" + _depth(spec)


def _depth(spec: Any) -> str:
    children = [_depth(child) for child in spec.children()] if hasattr(spec, "children") and not spec.is_leaf() else []
    return f" nested {children}" if any(children) else ""


def parts_of(what: str, batch: Any, fix: str, kind: type[AmpGraphError] = CalibrationError) -> tuple[Any, ...]:
    """Return a batch as a tuple, of its inputs and targets. Raises ``kind`` for one without a tensor.

    An object of another class (PyTorch Geometric's ``Data``) may hold tensors.
    """
    given = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if all(isinstance(leaf, PLAIN) for leaf in tree_leaves(_plain(given))):
        raise kind(
            f"{what} has no tensor: {shortened(batch, 80)}\n  legal: (inputs, *targets), a dict, or one tensor\n"
            f"  fix:   {fix}"
        )
    return given


def refuse_loss_fn(caller: str, loss_fn: Any, kind: type[AmpGraphError] = CalibrationError) -> None:
    """Raise ``kind`` for what is no loss function: a class, or nothing that can be called."""
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise kind(
            f"{caller}: loss_fn={shortened(loss_fn)} returns no loss\n  legal: a function, called as "
            "loss_fn(outputs, *targets); None where the model returns its loss\n"
            "  fix:   loss_fn=torch.nn.functional.cross_entropy"
        )


def output_and_loss(model: Any, loss_fn: LossFn | None, batch: tuple[Any, ...]) -> tuple[Any, Tensor | None]:
    """Return what ``model`` returns for a batch, and its loss; None if there is no loss function, and no loss in it."""
    if loss_fn is not None:
        out = call_model(model, batch[0])
        loss = _scalar(loss_fn(out, *batch[1:]))
        _refuse_detached(model, loss)
        return out, loss
    out = call_model(model, *batch)
    try:
        found = loss_of(out)
    except (TypeError, KeyError, IndexError, AttributeError):
        return out, None
    is_loss = isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad
    return out, found if is_loss else None


def _plain(given: tuple[Any, ...]) -> list[Any]:
    """Return the elements of a batch, mappings of other classes (``BatchEncoding``) as dicts."""
    return [dict(one) if isinstance(one, Mapping) else one for one in given]


def _refuse_detached(model: Any, loss: Tensor) -> None:
    if loss.requires_grad or not torch.is_grad_enabled():
        return
    trained = next((name for name, p in model.named_parameters() if p.requires_grad), None)
    if trained is not None:
        raise CalibrationError(
            f"loss_fn: the loss that it returned has no gradient, and the model trains {trained}\n"
            "  legal: a loss that is computed from the outputs; without loss_fn, forward alone is measured\n"
            "  fix:   return it without .detach(), .item() and torch.no_grad()"
        )


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        of = list(loss.shape) if isinstance(loss, Tensor) and loss.numel() != 1 else getattr(loss, "dtype", "")
        shown = f"a tensor of {of}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CalibrationError(
            f"loss_fn: it returned {shown}, which is not a loss\n  legal: a tensor of one floating-point number\n"
            "  fix:   loss_fn=lambda out, y: torch.nn.functional.mse_loss(out, y)"
        )
    return loss


def refuse_infinite(caller: str, loss: Tensor | None, number: int) -> None:
    """Raise CalibrationError for a loss that is not finite in fp32."""
    if loss is not None and not bool(torch.isfinite(loss.detach()).all()):
        raise CalibrationError(
            f"{caller}: the loss of batch {number} is {float(loss.detach()):g} in fp32, before any precision is "
            "lowered\n  legal: batches and weights whose loss is finite\n"
            "  fix:   check the batch, the loss function and the learning rate in fp32 first"
        )


def shown(caller: str, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches with a progress bar of tqdm, or lines without it, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from batches
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield from _with_lines(caller, batches)
    else:
        yield from tqdm(batches, desc=caller, unit="batch")


def _with_lines(caller: str, batches: Iterable[Any]) -> Iterator[Any]:
    total = f" of {len(batches)}" if isinstance(batches, Sized) else ""
    for number, batch in enumerate(batches, 1):
        print(f"{caller}: batch {number}{total}", file=sys.stderr)
        yield batch


def gradients(
    model: torch.nn.Module,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor | None] | None = None,
) -> Sequence[Tensor | None]:
    """Return the gradients of ``inputs``, None for those that the outputs do not depend on.

    ``given``: the gradients of the outputs. Where a backward is reentrant, inputs that are no leaves have None.
    """
    nodes = list(_nodes(outputs))
    if not any(REENTRANT in node.name() for node in nodes):
        return torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    reached = [node.variable for node in nodes if hasattr(node, "variable")]
    leaves = {id(t): t for t in (*reached, *model.parameters(), *inputs) if t.is_leaf}
    with _without_grads(list(leaves.values())):
        torch.autograd.backward(outputs, given)
        return [t.grad if t.is_leaf else None for t in inputs]


class Leaves(list[Tensor]):
    """The inputs of the graphs of one batch that require gradients, to differentiate its loss for."""

    def differentiate(self, model: torch.nn.Module, loss: Tensor | None, scale: float = 1.0) -> bool:
        """Run backward of ``loss`` times ``scale``, without touching ``.grad``; return whether there is one. Clear."""
        leaves = list({id(t): t for t in self}.values())
        self.clear()
        if loss is None or not loss.requires_grad or not leaves:
            return False
        gradients(model, [loss * scale], leaves)
        return True


@contextmanager
def _without_grads(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Take away ``.grad`` and the hooks behind its accumulation, such as an optimizer's step; put them back.

    The dict of hooks is emptied in place: the leaf's gradient accumulator keeps that dict whatever the attribute says.
    """
    grads = [leaf.grad for leaf in leaves]
    hooks = [leaf._post_accumulate_grad_hooks or {} for leaf in leaves]
    kept = [dict(one) for one in hooks]
    for leaf, one in zip(leaves, hooks, strict=True):
        leaf.grad = None
        one.clear()
    try:
        yield
    finally:
        for leaf, grad, one, before in zip(leaves, grads, hooks, kept, strict=True):
            leaf.grad = grad
            one.update(before)


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [t.grad_fn for t in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [one for one, _ in node.next_functions]
