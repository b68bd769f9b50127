"""An untraced training step: forward, autograd, and then the update that traced steps have in their graph.

Before: batches of thirty lengths, and a traced step for each. After: a forward captured once with symbolic sizes, or
uncaptured; gradients by autograd; and the same unscaling, clipping, update and loss scale, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.errors import CaptureError
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.step.step_parts import DETACHED, StepParts
from amp_graph.step.trace_step import StepBuilder
from amp_graph.step.traced_step import PlainCaptured

# Numbers of trained inputs, in the optimizer's order, and those with gradients of other micro-batches only.
Who = tuple[list[int], dict[int, Tensor]]


@dataclass(eq=False)
class PlainStep:
    """Runs steps of one captured forward; ``made`` is called with updates for which state was created.

    If the forward is uncaptured, the parameters with gradients may change from step to step. Only those are updated,
    as ``optimizer.step()`` skips parameters without a gradient.
    """

    builder: StepBuilder
    captured: PlainCaptured
    last: bool
    made: Callable[[Sequence[GroupUpdate]], None]
    update: str = ""
    known: dict[tuple[Any, ...], StepParts] = field(default_factory=dict)
    now: StepParts | None = None  # parts of the last call

    @property
    def updates(self) -> list[GroupUpdate]:
        """The updates whose state is held here."""
        return [update for parts in self.known.values() for update in parts.updates]

    def __call__(self, *args: Any) -> Any:
        """Run the step on the forward's inputs and return what the forward returned."""
        outputs, grads = self._gradients(args)
        self.now = parts = self._parts_for(args, grads)
        parts.args = args
        try:
            with torch.no_grad():
                found = parts.finish(outputs, grads)
        finally:
            parts.args = ()
        if not self.last or not parts.trained or not parts.options.outside:
            return found
        after, count = self.builder.outside(), len(outputs)
        assert after is not None, "only called if the optimizer is outside"
        behind = found[count + len(parts.trained) :]
        after(self.parameters(args), found[count : count + len(parts.trained)], behind[0] if behind else None)
        return found[:count]

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the parameters trained in the last call, in the order of their gradients."""
        parts = self.now
        assert parts is not None, "asked for after a call"
        return [parts.absent[i] if i in parts.absent else args[i] for i in parts.trained]

    def first_bad(self, args: Sequence[Any]) -> str:
        """Return the name of the first input whose gradient is not finite; runs the forward once more."""
        assert self.now is not None, "asked for after a call"
        with torch.random.fork_rng():
            _, grads = self._gradients(args)
        bad = [i for i, grad in grads.items() if not grad.isfinite().all()]
        return f"{self.now.names[bad[0]]}, of shape {tuple(args[bad[0]].shape)}" if bad else "a gradient that is gone"

    def _gradients(self, args: Sequence[Any]) -> tuple[list[Any], dict[int, Tensor]]:
        """Return the outputs, and the existing gradients of the scaled loss by input number."""
        own = [i for i in self.builder.trained(args, (), {})[0]]
        scale = self.builder.loss_scale
        if scale is not None and own:
            scale.to(args[own[0]].device)
        with torch.enable_grad():
            outputs = self.captured.computed()(*args)
            loss = outputs[self.captured.loss]
            scaled = loss if scale is None else loss * scale.scale
            if self.builder.micro_batches > 1:
                scaled = scaled / self.builder.micro_batches
            if own and not scaled.requires_grad:
                raise CaptureError(DETACHED)
            leaves = [args[i] for i in own]
            found = torch.autograd.grad(scaled, leaves, allow_unused=True) if own else ()
        self._refuse_sparse(found)
        grads = {i: grad for i, grad in zip(own, found, strict=True) if grad is not None}
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs], grads

    def _refuse_sparse(self, grads: Sequence[Tensor | None]) -> None:
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise CaptureError(
                "TrainStep: a gradient is sparse, which no fused update supports\n  legal: dense gradients\n"
                "  fix:   sparse=False in its embedding, or amp_graph.convert(model) with amp_graph.GradScaler"
            )

    def _parts_for(self, args: Sequence[Any], grads: Mapping[int, Tensor]) -> StepParts:
        """Return the parts of an update of exactly the inputs with gradients."""
        without = {i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in grads}
        trained, absent = self.builder.trained(args, without, self.builder.state.pending if self.last else {})
        key = (tuple(trained), tuple(map(id, absent.values())))
        found = self.known.get(key)
        if found is None:
            found, how = self.builder.plain_parts(self.captured, args, (trained, absent), self.last)
            self.update = how if self.last else ""
            self.made(found.updates)
            self.known[key] = found
            self.captured.bound.trained = frozenset(id(args[i]) for i in trained if i not in absent)
        return found
