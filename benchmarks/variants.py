"""The ways to run a model that ``speed.py`` compares, and what one step of each is.

Before: a model's name and ``Variant("amp_graph", policy="bf16")``. After: ``Prepared``, whose ``run()`` is one step.

Training is forward, backward and fused AdamW, in fp16 with a gradient scaler. Eager variants call the loss behind the
model, as loops do. What is compiled, and ``TrainStep``, is the model together with its loss, on all sides.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch._inductor.config
from model_case import Case
from models import case
from torch import Tensor, nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.memory.gradient_buffers import POOL
from amp_graph.passes.torch_compat.dynamo_entries import own_code_object

AUTOCAST, LAST, INDUCTOR, RECORDED = "autocast", " channels_last", " + Inductor", " cuda_graph"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """What all variants of a run share.

    ``skip``: passes of amp_graph; ``no_grad`` instead of inference mode; ``optimizer``: "AdamW" or "SGD", fused.
    """

    device: str = "cpu"
    dtype: str = "bf16"
    skip: str = ""
    no_grad: bool = False
    cuda_graphs: bool = False
    optimizer: str = "AdamW"


@dataclass(frozen=True)
class Variant:
    """One way to run a model: ``policy`` of amp_graph, ``autocast``, all of it ``low`` precision, or none of these."""

    name: str
    policy: str = ""
    autocast: bool = False
    low: bool = False
    whole: bool = False  # a TrainStep
    compiled: bool = False
    channels_last: bool = False
    frozen: bool = False  # Inductor's freezing: weights are constants, cast, packed and folded once and for all
    recorded: bool = False  # a TrainStep that is replayed as a CUDA graph

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it: autocast, of the same mode."""
        return self.autocast and not self.frozen


def variants(setup: Setup, images: bool, training: bool) -> list[Variant]:
    """Return every variant of a model: eager first, and autocast first in each mode."""
    skip = f",skip={setup.skip}" if setup.skip else ""
    policies = {"": setup.dtype + skip, " fast": f"{setup.dtype},accuracy=fast{skip}"}
    if not training:  # as autocast returns them
        policies[" low outputs"] = f"{setup.dtype},keep_outputs=false{skip}"
    found = [Variant("fp32")]
    for mode, compiled in (("", False), (INDUCTOR, True)):
        found.append(Variant(AUTOCAST + mode, autocast=True, compiled=compiled))
        if images:
            found.append(Variant(AUTOCAST + LAST + mode, autocast=True, compiled=compiled, channels_last=True))
        if compiled and not training:
            found.append(
                Variant(f"autocast frozen{mode}", autocast=True, compiled=True, channels_last=images, frozen=True)
            )
        if not compiled:
            found.append(Variant(f"pure {setup.dtype}", low=True, channels_last=images))
        ours: dict[str, dict] = {"amp_graph": {}}
        if training:
            ours["TrainStep"] = {"whole": True}
        if training and setup.device == "cuda":
            ours["TrainStep" + RECORDED] = {"whole": True, "recorded": True}
        for name, more in ours.items():
            found += [Variant(name + a + mode, p, compiled=compiled, **more) for a, p in policies.items()]
    return found


def chosen(found: Iterable[Variant], patterns: str, compiled: bool) -> list[Variant]:
    """Return the variants whose name one of the comma-separated ``patterns`` matches, and autocast in their modes.

    Without patterns the eager ones, with ``compiled`` all. Raises SystemExit where nothing matches.
    """
    every = list(found)
    wanted = [v for v in every if (compiled or not v.compiled) and not patterns]
    wanted += [v for v in every if any(fnmatchcase(v.name, p) for p in patterns.split(",")) and patterns]
    if not wanted:
        raise SystemExit(f"--variants {patterns!r} matches nothing\n  legal: patterns of {[v.name for v in every]}")
    modes = {False} | {v.compiled for v in wanted}
    return [v for v in every if v in wanted or (v.is_baseline and v.compiled in modes)]


@dataclass
class Prepared:
    """One variant of one model, ready to run; ``run`` makes one training step or inference call."""

    case: Case
    batch: tuple[Tensor, ...]
    run: Callable[[], object]
    optimizer: torch.optim.Optimizer | None = None
    converted: nn.Module | None = None
    step: amp_graph.TrainStep | None = None

    def weight_copies(self) -> list[Tensor]:
        """Return the low-precision copies of weights that are held from step to step."""
        if self.step is not None:
            return self.step.weight_copies()
        found = conversion_of(self.converted) if self.converted is not None else None
        return found.captured.frozen.tensors if found is not None and found.captured.frozen is not None else []

    def gradient_memory(self) -> list[Tensor]:
        """Return the memory that is held from step to step for gradients of tables."""
        return POOL.tensors if self.converted is not None or self.step is not None else []

    def seconds_of_passes(self) -> float | None:
        """Return what amp_graph's passes took so far, without capture and compiler; None for what has none."""
        found = conversion_of(self.converted) if self.converted is not None else None
        captured = self.step.captured if self.step is not None else found.graphs if found is not None else None
        return None if captured is None else sum(t.seconds for c in captured for t in c.rewritten.passes)


class WithLoss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, made: Case) -> None:
        super().__init__()
        self.model, self.loss_of = made.model, made.loss

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss_of(self.model, *batch)


def built(name: str, scale: float, variant: Variant, setup: Setup) -> tuple[Case, tuple[Tensor, ...]]:
    """Build a model and its batch in the dtype and memory format of a variant."""
    made = case(name, scale, setup.device)
    dtype = DTYPES[setup.dtype] if variant.low else None
    made.model.to(dtype=dtype, memory_format=torch.channels_last if variant.channels_last else None)
    return made, tuple(_as_given(x, dtype, variant.channels_last) for x in made.batch)


def _as_given(x: Tensor, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    """Return a tensor of a batch as a data loader would hand it over."""
    if dtype is not None and x.is_floating_point():
        x = x.to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last and x.dim() == 4 else x


def context_of(variant: Variant, setup: Setup) -> Callable[[], contextlib.AbstractContextManager]:
    """Return what makes the context that a variant's forward runs in."""
    if variant.autocast:
        return lambda: torch.autocast(setup.device, DTYPES[setup.dtype])
    return contextlib.nullcontext


def training_step(name: str, scale: float, variant: Variant, setup: Setup) -> Prepared:
    """Prepare training steps; nothing is captured before the first."""
    made, batch = built(name, scale, variant, setup)
    together = variant.whole or variant.compiled
    target = WithLoss(made) if together else made.model
    optimizer = getattr(torch.optim, setup.optimizer)(target.parameters(), lr=1e-4, fused=True)
    compile = "inductor" if variant.compiled else "eager"
    if variant.whole:
        step = amp_graph.TrainStep(
            target, None, optimizer, variant.policy, compile=compile, cuda_graph=variant.recorded
        )
        run = _not_twice(lambda: step(*batch)) if variant.recorded else _marked(lambda: step(*batch), variant, setup)
        return Prepared(made, batch, run, optimizer, step=step)
    called = _called(target, variant, compile)
    context = context_of(variant, setup)

    def loss() -> Tensor:
        with context():
            return called(*batch) if together else made.loss(called, *batch)

    run = _marked(_with_update(loss, optimizer, _scaler(variant, setup), made.micro_batches), variant, setup)
    return Prepared(made, batch, run, optimizer, target if variant.policy else None)


def inference_call(name: str, scale: float, variant: Variant, setup: Setup) -> Prepared:
    """Prepare calls in evaluation mode, of a frozen model where amp_graph runs it eagerly."""
    made, batch = built(name, scale, variant, setup)
    made.model.eval()
    called = _called(made.model, variant, "inductor" if variant.compiled else "eager")
    if variant.policy and not variant.compiled:
        amp_graph.freeze(made.model)
    context = context_of(variant, setup)
    without = torch.no_grad if setup.no_grad else torch.inference_mode

    def call() -> object:
        with without(), context():
            return made.infer(called, *batch)

    run = _marked(_frozen_at_first(call) if variant.frozen else call, variant, setup)
    return Prepared(made, batch, run, converted=made.model if variant.policy else None)


def _frozen_at_first(call: Callable[[], object]) -> Callable[[], object]:
    """Switch Inductor's freezing on for the first call, which compiles; as an option of torch.compile it has no effect.

    Dynamo, which makes parameters constants or inputs, asks for the switch of the whole process alone.
    """
    contexts = iter([torch._inductor.config.patch(freezing=True)])

    def run() -> object:
        with next(contexts, contextlib.nullcontext()):
            return call()

    return run


def _marked(run: Callable[[], object], variant: Variant, setup: Setup) -> Callable[[], object]:
    """Tell CUDA graphs where a step begins: what the last one returned is theirs again."""
    if not (variant.compiled and setup.cuda_graphs):
        return run

    def marked() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return run()

    return marked


def _not_twice(run: Callable[[], object]) -> Callable[[], object]:
    """Have Inductor record no CUDA graphs of its own, where the step is one."""

    def once() -> object:
        with torch._inductor.config.patch({"triton.cudagraphs": False}):
            return run()

    return once


def _called(target: nn.Module, variant: Variant, compile: str) -> Callable:
    if variant.policy:
        return amp_graph.convert(target, variant.policy, compile=compile)
    if variant.frozen:

        def forward(*args: object, **options: object) -> object:
            return target(*args, **options)

        return torch.compile(own_code_object(forward))  # else it runs what was compiled for a model that is not frozen
    return torch.compile(target) if variant.compiled else target


def _scaler(variant: Variant, setup: Setup) -> torch.amp.GradScaler | None:
    if setup.dtype != "fp16" or not (variant.policy or variant.autocast):
        return None
    return amp_graph.GradScaler() if variant.policy else torch.amp.GradScaler(setup.device)


def _with_update(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    micro_batches: int = 1,
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for _ in range(micro_batches):
            found = loss() / micro_batches if micro_batches > 1 else loss()
            (found if scaler is None else scaler.scale(found)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return run
