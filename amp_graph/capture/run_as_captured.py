"""Falls back to the captured graph when the rewritten graph raises.

Before: one of our kernels raises on its first call. After: this call and all later ones run as captured, under
autocast, or in full precision where that fails as well, and the report names the error.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from amp_graph.capture.dynamo_backend import lower
from amp_graph.passes.autocast_regions.autocast_fallback import run_as_autocast
from amp_graph.passes.graph.grad_regions import switches_modes
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.passes.torch_compat.dynamo_entries import SETTLED
from amp_graph.policy import Policy
from amp_graph.rewrite import copy_graph, read_values

Rung = Callable[[], Runner]


def rungs_below(gm: GraphModule, policy: Policy, device: str) -> list[Rung]:
    """Return what runs ``gm`` where its rewritten form fails: as captured under autocast, then in full precision."""
    plain = replace(policy, level="O0", widen=False)  # parameters are as they are by now

    def under_autocast() -> Runner:
        written = copy_graph(gm)
        read_values(written)
        run_as_autocast(written, policy.torch_dtype(device), device, "", keep_outputs=policy.keep_outputs)
        return lower(written, (), "eager", plain)

    in_full = partial(lower, gm, (), "eager", plain)
    casts = policy.runs_under_autocast(device) and not switches_modes(gm)  # the user's own regions decide
    return [under_autocast, in_full] if casts else [in_full]


def or_as_captured(first: Rung, rungs: Sequence[Rung], tell: Callable[[Exception], None], *, always: bool) -> Runner:
    """Run what ``first`` returns; once it raises, the first of ``rungs`` that does not, from then on.

    A call that wrote its inputs before it raised is not run again; its error propagates. ``always``: guard every call
    (for graphs with varying sizes), not only calls until the first success. ``tell`` receives the error and may raise.

    If all fail, the error of the captured graph is raised. Once the callable in use is known, ``settled`` names it.
    """
    found: Runner | None = None  # the callable in use, once known
    ladder: list[Rung] = [functools.cache(first), *rungs]  # with a graph, which is freed once that is known

    def call(*args: Any) -> Any:
        nonlocal found
        if found is not None:
            return found(*args)
        versions, failed = _versions(args), None
        for one in [*ladder]:
            try:
                run = one()
                result = run(*args)
                break
            except Exception as error:
                if one is ladder[-1] or is_out_of_memory(error) or versions is None or _versions(args) != versions:
                    raise
                failed = failed or error
                traceback.clear_frames(error.__traceback__)  # they hold the user's regions open
        if failed is not None:
            tell(failed)
        if failed is not None or not always:
            found = run
            ladder.clear()
        return result

    if not always:
        settling(call, lambda: found)
    return call


def settling(wrapper: Runner, asked: Callable[[], Runner | None]) -> Runner:
    """Let ``settled`` find through ``wrapper``: ``asked`` returns what its later calls come down to, None before."""
    setattr(wrapper, SETTLED, asked)
    return wrapper


def settled(run: Runner) -> Runner | None:
    """Return what later calls of ``run`` come down to: ``run`` itself if it is no wrapper; None while that is open."""
    asked = getattr(run, SETTLED, None)
    return run if asked is None else asked()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device is out of memory: the captured graph would need more."""
    return type(error).__name__ == "OutOfMemoryError"


def _versions(args: Sequence[Any]) -> list[int] | None:
    """Return the version counters of the tensors in ``args``; None if one has none."""
    given = [a for a in args if isinstance(a, Tensor)]
    return None if any(a.is_inference() for a in given) else [a._version for a in given]
