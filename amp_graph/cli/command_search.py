"""``amp-graph search``: finds the fastest policy of TARGET that is exact enough, by measuring on this machine."""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_graph.cli.capture_target import read_batch, target_and_batch, users_code
from amp_graph.cli.script_steps import first_steps
from amp_graph.cli.terminal import Told
from amp_graph.errors import AmpGraphError
from amp_graph.model_state import seeded
from amp_graph.numerics.batches import output_and_loss
from amp_graph.policy import Policy
from amp_graph.run.options import writable
from amp_graph.run.script import module_target, script_target
from amp_graph.search.search import Limits, search
from amp_graph.search.space import Step
from amp_graph.step.step_arguments import call_model


def run(args: argparse.Namespace) -> Told:
    """Search, with a line on stderr for each policy; a model in evaluation mode is called without gradients."""
    state = writable(args.state, "search: --state", "search.json")
    page = writable(args.report, "search: --report", "search.html")
    with users_code(), seeded():
        model, step, held_out = _of_target(args) if args.script is None else _of_script(args)
        found = search(
            model, step, budget=args.budget, absolute=args.absolute, held_out=held_out, policy=args.policy or "bf16",
            limits=Limits(args.runs, args.seconds, without=() if args.script is None else ("level",)), state=state,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    found = replace(found, script=shlex.join(args.script or ()), again=shlex.join(args.command_line))
    if page is not None:
        found.html(page)
    return Told(found.to_dict(), [found.text().removesuffix("\n")])


def _of_target(args: argparse.Namespace) -> tuple[torch.nn.Module, Step, Step | None]:
    """Return the model of TARGET, and steps on the batches that were given."""
    if args.target is None:
        raise AmpGraphError(
            "search: a TARGET or --script SCRIPT is needed\n  legal: one of them\n"
            "  fix:   amp-graph search --script train.py"
        )
    target, batch, loss_fn = target_and_batch(args, "search")
    if loss_fn is None and target.model.training and len(batch) > 1:
        try:
            inspect.signature(target.model.forward).bind(*batch)
        except TypeError as error:
            raise AmpGraphError(
                f"search: --batch has {len(batch)} parts, which are no arguments of {type(target.model).__name__}: "
                f"{error}\n  legal: --loss, which takes the output and the targets; or a model that returns its loss\n"
                "  fix:   --loss losses.py:loss"
            ) from error
    held_out = None if args.held_out is None else _step(read_batch(args.held_out, "search"), loss_fn)
    return target.model, _step(batch, loss_fn), held_out


def _of_script(args: argparse.Namespace) -> tuple[torch.nn.Module, Step, Step | None]:
    """Return the model of a script, its next to last step, and its last one: the only one if there is no other."""
    others = ("target", "input", "batch", "loss", "held_out", "training")
    given = [f"--{name}" for name in others if getattr(args, name) not in (None, [])]
    if given or not args.script:
        raise AmpGraphError(
            f"search: --script with {', '.join(given) or 'nothing'}: a script has its own model, batches and loss\n"
            "  legal: one of TARGET and --script\n  fix:   amp-graph search --script train.py"
        )
    is_module = args.script[0] == "-m"
    name, *words = args.script[is_module:]
    load = module_target if is_module else script_target
    found = first_steps(load(name, "search --script"), words, Policy.parse(args.policy or "bf16"))
    assert found.model is not None, "a step has a model"
    what = f"{type(found.model).__name__}, with {sum(p.numel() for p in found.model.parameters()):,} parameters"
    print(f"of {name}: {what}; {len(found.steps)} steps", file=sys.stderr, flush=True)
    return found.model, found.steps[-2:][0], found.steps[-1] if len(found.steps) > 1 else None


def _step(batch: tuple[Any, ...], loss_fn: Any) -> Step:
    def step(model: torch.nn.Module) -> Any:
        if model.training:
            return output_and_loss(model, loss_fn, batch)[1]
        with torch.no_grad():
            out = call_model(model, batch[0])
        return next(t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())

    return step
