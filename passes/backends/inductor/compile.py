"""Inductor with passes of ours over the ATen graphs that it generates code from.

Before: ``compile_fx(gm, inputs)``.
After: ``compile_with_inductor(gm, inputs, passes=[LowerWeightGradients()])``.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from amp_graph.passes.base import Pass
from amp_graph.passes.manager import run_passes
from amp_graph.passes.torch_compat.dynamo_entries import undisabled
from amp_graph.passes.torch_compat.inductor import compile_graph, graph_pass_hook, inductor_config, mode_options

DEFAULT = (None, "default")
RECORDS = "triton.cudagraphs"  # records what it compiles in CUDA graphs; part of two modes


def resolved(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``mode`` and ``options``, which take precedence; both are checked."""
    given = {name.replace("-", "_"): setting for name, setting in options.items()}
    return {**mode_options().get(mode or "default", {}), **given}


def why_not(mode: Any, options: Mapping[Any, Any]) -> tuple[str, str]:
    """Return what is wrong with a mode and options, and what is legal; empty strings if nothing is."""
    if mode not in DEFAULT and (not isinstance(mode, str) or mode not in mode_options()):
        return f"unknown mode={mode!r}", ", ".join(mode_options())
    for name, setting in options.items():
        wrong, legal = _why_not(name, setting)
        if wrong:
            return wrong, legal
    return "", ""


def _why_not(name: Any, setting: Any) -> tuple[str, str]:
    config = inductor_config()
    known: dict[str, Any] = config.get_config_copy()
    if not isinstance(name, str) or name.replace("-", "_") not in known:
        near = difflib.get_close_matches(str(name), known, 3, 0.6)
        what = ", ".join(near) if near else "the names in torch._inductor.config, such as max_autotune"
        return f"unknown option {name!r}", what
    wanted: Any = config.get_type(name.replace("-", "_"))
    # As torch.compile, which checks no generic types.
    if typing.get_origin(wanted) is None and isinstance(wanted, type) and not isinstance(setting, wanted):
        return f"option {name!r} is {setting!r}", f"a value of type {wanted.__name__}"
    return "", ""


HOOK = "post_grad_custom_pre_pass"


def compile_with_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    passes: Sequence[Pass] = (),
    whole: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm``, and later its backward, with Inductor, running ``passes`` over its flat graphs.

    whole: ``gm`` is the flat graph of a step, which has no backward and is called with Dynamo off. Inductor options
    that the user has set take precedence, as does a custom pass of the user. options: such options for this graph.
    """
    ours: dict[str, Any] = {HOOK: _hook(passes)} if getattr(inductor_config(), HOOK) is None else {}
    compiled: Any = compile_graph(gm, example_inputs, {**ours, **(options or {})})
    return undisabled(compiled) if whole else compiled


def _hook(passes: Sequence[Pass]) -> Any:
    """Return passes as an Inductor hook, with their source as the key of its cache."""

    def run(graph: Graph) -> None:
        owner = graph.owning_module
        gm = owner if isinstance(owner, GraphModule) else GraphModule(torch.nn.Module(), graph)
        run_passes(gm, passes)

    files = (__file__, *sorted({inspect.getfile(type(one)) for one in passes}))
    return graph_pass_hook(run, files, [[repr(one) for one in passes]])
