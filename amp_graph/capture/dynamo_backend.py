"""The Dynamo backend: a captured graph in, a callable that runs the rewritten graph out.

``torch.compile(model, backend="amp_graph", options={"policy": "bf16", "compile": "inductor"})``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.weak import WeakTensorKeyDictionary

from amp_graph.capture.fp32_accumulation import accumulating_in_fp32
from amp_graph.compiler_options import Options, read_options
from amp_graph.devices import device_of
from amp_graph.errors import CaptureError, PolicyError
from amp_graph.lists.errors import Undo
from amp_graph.passes.backends.inductor.compile import DEFAULT, compile_with_inductor, why_not
from amp_graph.passes.graph.activation_checkpoints import outline_checkpoints, tag_checkpoints
from amp_graph.passes.graph.autograd_functions import call_custom_functions
from amp_graph.passes.graph.direct_dispatch import direct_calls
from amp_graph.passes.graph.grad_regions import switches_modes
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.passes.manager import run_passes
from amp_graph.passes.pipeline_row import Phase
from amp_graph.passes.pipeline_table import pipeline
from amp_graph.passes.torch_compat.dispatch import ModesOfThread
from amp_graph.passes.torch_compat.dynamo_capture import Runner, lookup_backend
from amp_graph.policy import Policy
from amp_graph.rewrite import Rewritten, rewrite_in_place, warn_of_full_precision

Compile = str | Callable[..., Runner]
OWN = ("policy", "compile", "mode")  # options of the backend that are not Inductor's
READERS = WeakTensorKeyDictionary()  # the graphs of this backend, by each parameter that they read


@dataclass(eq=False)
class Captured:
    """One captured graph: its rewritten form, and the graph break that ended it, if any.

    ``compiled_by``: the compiler that ``torch.compile(model, backend="amp_graph")`` asked for, and its options.
    """

    rewritten: Rewritten
    training: bool | None
    grad: bool
    break_reason: str = ""
    break_line: str = ""
    compiled_by: tuple[Compile, Options] = ("eager", {})


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

    ``options`` is what ``torch.compile(options=...)`` passes on: "policy", "compile" and "mode" by name, and options
    of Inductor. ``mode``: one of Inductor's. It and Inductor's options imply compile="inductor" (default: "eager").
    Raises PolicyError for another option or mode.
    """
    given = {"policy": policy, "compile": compile, "mode": mode, **(options or {})}
    policy, compile, mode = (given.pop(name) for name in OWN)
    _refuse_unknown(given)
    chosen = compile or ("eager" if mode in DEFAULT and not given else "inductor")
    check_compile("backend amp_graph", chosen)
    example = "torch.compile(model, backend='amp_graph', mode='max-autotune-no-cudagraphs')"
    found = read_options("backend amp_graph", chosen, mode, given, example=example)
    read = Policy.parse(policy)
    rewritten = rewrite_in_place(gm, read, eager=chosen == "eager", inductor=found if chosen == "inductor" else None)
    graph = Captured(rewritten, None, torch.is_grad_enabled(), compiled_by=(chosen, found))
    for value in example_inputs:
        if isinstance(value, torch.nn.Parameter):
            READERS.setdefault(value, []).append(graph)
    if LEFT_ALONE in gm.meta:
        warn_of_full_precision("a graph of torch.compile", gm, rewritten.dtype)
    return lower(gm, example_inputs, chosen, read, options=found)


def graphs_of(model: torch.nn.Module) -> list[Captured]:
    """Return the graphs of this backend that read a parameter of ``model``, in order."""
    return [*dict.fromkeys(graph for p in model.parameters() for graph in READERS.get(p, ()))]


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise PolicyError for an option that is neither ours nor Inductor's."""
    for name, setting in options.items():
        wrong, near = why_not(None, {name: setting})
        if wrong.startswith("unknown"):
            raise PolicyError(
                f"backend amp_graph: {wrong}\n  legal: {', '.join(OWN)}, and options of Inductor: {near}\n"
                "  fix:   torch.compile(model, backend='amp_graph', options={'policy': 'bf16'})"
            )


def check_compile(caller: str, compile: Compile) -> None:
    """Raise CaptureError if ``compile`` names no backend."""
    if compile == "eager" or callable(compile):
        return
    legal = torch.compiler.list_backends(exclude_tags=())
    if compile not in legal:
        raise CaptureError(
            f"{caller}: unknown compile={compile!r}\n  legal: a Dynamo backend ({', '.join(legal)}) or a callable\n"
            "  fix:   compile='inductor'"
        )


def lower(
    gm: GraphModule, example_inputs: Sequence[Any], compile: Compile, policy: Policy, *, options: Options | None = None
) -> Runner:
    """Return a callable for ``gm``: the graph itself under PyTorch's autograd, or the result of a backend.

    options: Inductor's options.
    """
    switches = switches_modes(gm)  # read before a backend consumes the graph
    run = with_sums_in_fp32(_lowered(gm, example_inputs, compile, policy, options), policy, device_of(gm))

    def restoring_modes(*args: Any) -> Any:
        with Undo(ModesOfThread().restore):
            return run(*args)

    return restoring_modes if switches else run


def _lowered(
    gm: GraphModule, example_inputs: Sequence[Any], compile: Compile, policy: Policy, options: Options | None
) -> Runner:
    if compile == "eager":
        outline_checkpoints(gm)
        _run_selective_checkpoints(gm)
        call_custom_functions(gm)
        return direct_calls(gm)
    tag_checkpoints(gm)
    device = device_of(gm)
    inductor = (options or {}) if compile == "inductor" else None
    run_passes(gm, pipeline(Phase.HANDOVER, policy.pipeline_options(device, inductor=inductor)))
    return compiler_of(compile, policy, device, options=options)(gm, list(example_inputs))


def with_sums_in_fp32(run: Runner, policy: Policy, device: str) -> Runner:
    """Wrap ``run`` so that its matmuls accumulate in fp32, if PyTorch's settings for ``device`` allow less.

    Policies that reproduce torch.autocast, and fp32 itself, keep PyTorch's settings.
    """
    ours = device == "cuda" and policy.level != "O0" and policy.op_list(device).unlisted == "opaque"
    return accumulating_in_fp32(run) if ours else run


def compiler_of(
    compile: Compile, policy: Policy, device: str, *, whole: bool = False, options: Options | None = None
) -> Callable[..., Runner]:
    """Return the compiler of graphs: Inductor with our passes, another Dynamo backend, or the given function.

    whole: the graphs are whole training steps. options: Inductor's options.
    """
    if compile == "inductor":
        if policy.emulate and policy.level != "O0":  # without it, Inductor leaves out roundings within a kernel
            options = {"emulate_precision_casts": True, **(options or {})}
        passes = pipeline(Phase.INDUCTOR, policy.pipeline_options(device))
        return functools.partial(compile_with_inductor, passes=passes, whole=whole, options=options)
    return lookup_backend(compile) if isinstance(compile, str) else compile


def _run_selective_checkpoints(gm: GraphModule) -> None:
    """Make selective checkpoints draw the same random numbers again when the graph runs eagerly.

    The captured operator leaves that to compilers: run eagerly, it recomputes with other dropout masks.
    """
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            node.target = _selective_checkpoint


def _selective_checkpoint(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    context = body.meta.get("_checkpoint_context_fn") or kwargs.get("context_fn")
    options = {"context_fn": context} if context else {}
    return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=False, **options)
