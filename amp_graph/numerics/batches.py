"""Runs the batches of a user through his model, both checked: structure, a loss that is finite in fp32, gradients.

A batch is what ``TrainStep`` takes: ``(inputs, *targets)`` with a loss function, which is called as
``loss_fn(model(inputs), *targets)``; without one, the arguments of a model that may return its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from amp_graph.capture.conversion import WRAPPERS
from amp_graph.convert import refuse_converted, refuse_meta, refuse_what_is_no_model, warn_of_unmatched
from amp_graph.errors import AmpGraphError, CalibrationError, CaptureError
from amp_graph.lists.errors import shortened
from amp_graph.passes.torch_compat.autograd import REENTRANT, nodes_behind
from amp_graph.passes.torch_compat.modules import uninitialized
from amp_graph.policy import Policy
from amp_graph.step.step_arguments import call_model, loss_of, refuse_loss_fn, refuse_what_is_no_loss

LossFn = Callable[..., Any]
PLAIN = (int, float, complex, str, bytes, type(None))  # what holds no tensor


def to_measure(caller: str, model: Any, loss_fn: Any, policy: Policy | str | None) -> tuple[torch.nn.Module, Policy]:
    """Return what to measure: the wrapped one of a data-parallel wrapper, whose processes measure their own; a policy.

    Raises CaptureError for what is no model, cannot be run, or is converted already; CalibrationError for what is no
    loss function; PolicyError. Warns of modules that the policy names and the model does not have.
    """
    model = model.module if isinstance(model, WRAPPERS) else model
    refuse_what_is_no_model(caller, model)
    refuse_what_cannot_run(caller, model)
    refuse_converted(caller, model)
    refuse_loss_fn(caller, loss_fn, CalibrationError)
    asked = Policy.parse(policy)
    warn_of_unmatched(model, asked)
    return model, asked


def refuse_what_cannot_run(caller: str, model: torch.nn.Module) -> None:
    """Raise CaptureError for a model whose parameters hold no values, and in inference mode."""
    if torch.is_inference_mode_enabled():
        raise CaptureError(
            f"{caller}: called under torch.inference_mode(), which disables gradients\n  fix:   call it outside"
        )
    lazy = uninitialized([*model.named_parameters(), *model.named_buffers()])
    if lazy:
        raise CaptureError(
            f"{caller}: {len(lazy)} parameters are not initialized, the first is {lazy[0]}; the call that initializes "
            "them would change the model\n  fix:   call the model once on a batch before"
        )
    refuse_meta(caller, model)


# -- batches --------------------------------------------------------------------------------------------------


def checked(caller: str, batches: Iterable[Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield each batch with its number, as a tuple.

    Raises CalibrationError if there is none, or one whose structure, dtypes or dimensions are not those of the first.
    """
    if isinstance(batches, (Tensor, str, dict)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{caller}: a {type(batches).__name__} is no iterable of batches\n  legal: a list, a DataLoader\n"
            f"  fix:   amp_graph.{caller}(model, [batch])"
        )
    first = ""
    for number, batch in enumerate(batches):
        found = _structure(batch)
        first = first or found
        if found != first:
            raise CalibrationError(
                f"{caller}: batch {number} has another structure than batch 0: {found} instead of {first}\n"
                "  legal: batches of one structure, with the dtypes and numbers of dimensions of the first\n"
                f"  fix:   one call of amp_graph.{caller} for each kind of batch"
            )
        yield number, parts_of(f"{caller}: batch {number}", batch, f"amp_graph.{caller}(model, [(x, y)], loss_fn)")
    if not first:
        raise CalibrationError(
            f"{caller}: there are no batches\n  legal: at least one; a generator can be used once only\n"
            f"  fix:   amp_graph.{caller}(model, list(batches))"
        )


def _structure(batch: Any) -> str:
    """Return the structure of a batch as text: ``(float32[2d], int64[1d])``, with what is not flat."""
    leaves, spec = tree_flatten(list(batch) if isinstance(batch, tuple) else batch)
    told = [
        f"{str(leaf.dtype).removeprefix('torch.')}[{leaf.dim()}d]" if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ]
    return f"({', '.join(told)})" + ("" if spec == tree_flatten(list(leaves))[1] else f" in {spec}")


def parts_of(what: str, batch: Any, fix: str, kind: type[AmpGraphError] = CalibrationError) -> tuple[Any, ...]:
    """Return a batch as a tuple, of its inputs and targets. Raises ``kind`` for one without a tensor.

    A mapping of any class, and an object of another class (PyTorch Geometric's ``Data``), may hold tensors.
    """
    given = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if all(isinstance(leaf, PLAIN) for leaf in tree_leaves([dict(x) if isinstance(x, Mapping) else x for x in given])):
        raise kind(
            f"{what} has no tensor: {shortened(batch, 80)}\n  legal: (inputs, *targets), a dict, or one tensor\n"
            f"  fix:   {fix}"
        )
    return given


def output_and_loss(model: Any, loss_fn: LossFn | None, batch: tuple[Any, ...]) -> tuple[Any, Tensor | None]:
    """Return what ``model`` returns for a batch, and its loss; None if there is no loss function, and no loss in it."""
    if loss_fn is not None:
        out = call_model(model, batch[0])
        loss = loss_fn(out, *batch[1:])
        refuse_what_is_no_loss(loss, "loss_fn")
        refuse_detached("loss_fn", model.named_parameters(), loss)
        return out, loss
    out = call_model(model, *batch)
    try:
        found = loss_of(out)
    except (TypeError, KeyError, IndexError, AttributeError):
        return out, None
    return out, found if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad else None


def refuse_detached(
    who: str, named: Iterable[tuple[str, Tensor]], loss: Tensor, kind: type[AmpGraphError] = CalibrationError
) -> None:
    """Raise ``kind`` for a loss that no backward can begin at, though parameters, ``named``, are trained."""
    trained = next((name for name, p in named if p.requires_grad), None)
    if trained is not None and not loss.requires_grad and torch.is_grad_enabled():
        raise kind(
            f"{who}: the loss has no gradient, and the model trains {trained}\n"
            "  legal: a loss that is computed from the outputs\n"
            "  fix:   return it from loss_fn without .detach(), .item() and torch.no_grad()"
        )


def refuse_infinite(caller: str, loss: Tensor | None, number: int) -> None:
    """Raise CalibrationError for a loss that is not finite in fp32."""
    if loss is not None and not bool(torch.isfinite(loss.detach()).all()):
        raise CalibrationError(
            f"{caller}: the loss of batch {number} is {float(loss.detach()):g} in fp32, before any precision is "
            "lowered\n  legal: batches and weights whose loss is finite\n"
            "  fix:   check the batch, the loss function and the learning rate in fp32 first"
        )


def gradients(model: torch.nn.Module, loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradients of ``inputs``, None for those that the loss does not depend on.

    Where a backward is reentrant, inputs that are no leaves have None; ``.grad`` and the hooks behind its accumulation,
    such as an optimizer's step, are taken away meanwhile.
    """
    nodes = list(nodes_behind([loss.grad_fn]))
    if not any(REENTRANT in node.name() for node in nodes):
        return torch.autograd.grad(loss, inputs, allow_unused=True)
    reached = [node.variable for node in nodes if hasattr(node, "variable")]
    leaves = list({id(t): t for t in (*reached, *model.parameters(), *inputs) if t.is_leaf}.values())
    # Emptied in place: the leaf's gradient accumulator keeps that dict of hooks whatever the attribute says.
    hooks = [leaf._post_accumulate_grad_hooks or {} for leaf in leaves]
    kept = [(leaf, leaf.grad, one, dict(one)) for leaf, one in zip(leaves, hooks, strict=True)]
    for leaf, _, one, _ in kept:
        leaf.grad = None
        one.clear()
    try:
        torch.autograd.backward(loss)
        return [t.grad if t.is_leaf else None for t in inputs]
    finally:
        for leaf, grad, one, before in kept:
            leaf.grad = grad
            one.update(before)


def differentiate(model: torch.nn.Module, loss: Tensor | None, leaves: list[Tensor], scale: float = 1.0) -> bool:
    """Run backward of ``loss`` times ``scale`` to ``leaves``, without touching ``.grad``; say whether there is one.

    ``leaves``: the inputs of the graphs of one batch that require gradients; it is emptied.
    """
    inputs = list({id(t): t for t in leaves}.values())
    leaves.clear()
    if loss is None or not loss.requires_grad or not inputs:
        return False
    gradients(model, loss * scale, inputs)
    return True
