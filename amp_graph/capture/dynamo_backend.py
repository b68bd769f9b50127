"""The Dynamo backend: a captured graph in, a callable that runs the rewritten graph out.

``torch.compile(model, backend="amp_graph", options={"policy": "bf16", "compile": "inductor"})``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from amp_graph.capture.fp32_accumulation import accumulating_in_fp32
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError, PolicyError
from amp_graph.passes.backends.inductor.compile import compile_with_inductor, modes_of_inductor
from amp_graph.passes.graph.activation_checkpoints import outline_checkpoints, tag_checkpoints
from amp_graph.passes.graph.autograd_functions import call_custom_functions
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.graph.grad_regions import switches_modes
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline import pipeline
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.torch_compat.dispatch import ModesOfThread
from amp_graph.passes.weights.memory_access_hooks import have_data_noticed
from amp_graph.policy import Policy
from amp_graph.rewrite import rewrite_in_place

Runner = Callable[..., Any]
Compile = str | Callable[..., Runner]


def amp_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    policy: Policy | str | None = None,
    compile: Compile | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Runner:
    """Rewrite ``gm`` under ``policy`` and hand it to the backend ``compile``; see ``amp_graph.convert``.

    ``options`` is what ``torch.compile(options=...)`` passes on: "policy", "compile" and "mode" by name. ``mode``:
    one of Inductor's; it implies compile="inductor" (default: "eager"). Raises PolicyError for another option or mode.
    """
    given = {"policy": policy, "compile": compile, "mode": mode, **(options or {})}
    if unknown := sorted(set(given) - {"policy", "compile", "mode"}):
        raise PolicyError(
            f"backend amp_graph: unknown option {unknown[0]!r}\n"
            "  legal: policy, compile, mode\n"
            "  fix:   torch.compile(model, backend='amp_graph', options={'policy': 'bf16'})"
        )
    chosen = given["compile"] or ("eager" if given["mode"] in (None, "default") else "inductor")
    check_compile("backend amp_graph", chosen)
    _check_mode(given["mode"], chosen)
    read = Policy.parse(given["policy"])
    rewrite_in_place(gm, read, eager=chosen == "eager")
    return lower(gm, example_inputs, chosen, read, mode=given["mode"])


def _check_mode(mode: Any, compile: Compile) -> None:
    """Raise PolicyError if Inductor has no such ``mode``, or ``compile`` is not Inductor."""
    if mode in (None, "default"):
        return
    legal = modes_of_inductor()
    if mode not in legal:
        raise PolicyError(
            f"backend amp_graph: unknown mode={mode!r}\n  legal: {', '.join(legal)}\n"
            "  fix:   torch.compile(model, backend='amp_graph', mode='max-autotune-no-cudagraphs')"
        )
    if compile != "inductor":
        raise PolicyError(
            f"backend amp_graph: mode={mode!r} is one of Inductor's, and compile={compile!r}\n"
            f"  fix:   options={{'mode': {mode!r}, 'compile': 'inductor'}}, or no mode"
        )


def check_compile(caller: str, compile: Compile) -> None:
    """Raise CaptureError if ``compile`` names no backend."""
    if compile == "eager" or callable(compile):
        return
    legal = torch._dynamo.list_backends(exclude_tags=())
    if compile not in legal:
        raise CaptureError(
            f"{caller}: unknown compile={compile!r}\n  legal: a Dynamo backend ({', '.join(legal)}) or a callable\n"
            "  fix:   compile='inductor'"
        )


def lower(
    gm: GraphModule, example_inputs: Sequence[Any], compile: Compile, policy: Policy, *, mode: str | None = None
) -> Runner:
    """Return a callable for ``gm``: the graph itself under PyTorch's autograd, or the result of a backend.

    mode: Inductor's mode.
    """
    switches = switches_modes(gm)  # read before a backend consumes the graph
    run = with_sums_in_fp32(_lowered(gm, example_inputs, compile, policy, mode), policy, device_of(gm))
    return _restoring_modes(run) if switches else run


def _restoring_modes(run: Runner) -> Runner:
    """Wrap ``run``, which contains the user's mode regions, to restore the modes if it raises."""

    def call(*args: Any) -> Any:
        modes = ModesOfThread()
        try:
            return run(*args)
        except BaseException:
            modes.restore()
            raise

    return call


def _lowered(
    gm: GraphModule, example_inputs: Sequence[Any], compile: Compile, policy: Policy, mode: str | None
) -> Runner:
    if compile == "eager":
        outline_checkpoints(gm)
        _run_selective_checkpoints(gm)
        call_custom_functions(gm)
        have_data_noticed(gm)
        return direct_calls(gm)
    tag_checkpoints(gm)
    device = device_of(gm)
    run_passes(gm, pipeline(Phase.HANDOVER, policy.pipeline_options(device)))
    return compiler_of(compile, policy, device, mode=mode)(gm, list(example_inputs))


def with_sums_in_fp32(run: Runner, policy: Policy, device: str) -> Runner:
    """Wrap ``run`` so that its matmuls accumulate in fp32, if PyTorch's settings for ``device`` allow less.

    Policies that reproduce torch.autocast, and fp32 itself, keep PyTorch's settings.
    """
    ours = device == "cuda" and policy.level != "O0" and policy.op_list(device).unlisted == "opaque"
    return accumulating_in_fp32(run) if ours else run


def compiler_of(
    compile: Compile, policy: Policy, device: str, *, whole: bool = False, mode: str | None = None
) -> Callable[..., Runner]:
    """Return the compiler of graphs: Inductor with our passes, another Dynamo backend, or the given function.

    whole: the graphs are whole training steps. mode: Inductor's mode.
    """
    if compile == "inductor":
        passes = pipeline(Phase.INDUCTOR, policy.pipeline_options(device))
        return functools.partial(compile_with_inductor, passes=passes, whole=whole, mode=mode)
    return torch._dynamo.lookup_backend(compile) if isinstance(compile, str) else compile


def _run_selective_checkpoints(gm: GraphModule) -> None:
    """Make selective checkpoints recompute when the graph runs eagerly.

    The captured operator only marks its body for a partitioner; run eagerly, it would save everything.
    """
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            node.target = _selective_checkpoint


def _selective_checkpoint(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    context = body.meta.get("_checkpoint_context_fn") or kwargs.get("context_fn")
    options = {"context_fn": context} if context else {}
    return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False, **options)
