"""The ladder on which a captured graph runs: rewritten; as captured, under the policy's autocast; as captured, in fp32.

Before: one of our kernels raises on its first call. After: this call and all later ones run on the next rung, and the
report names the error.
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
from amp_graph.passes.torch_compat.dynamo_entries import FAST_PATH
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


def on_ladder(rungs: Sequence[Rung], warn: Callable[[Exception], None], *, always: bool) -> Runner:
    """Run the first of ``rungs`` that does not raise, from then on.

    A call that wrote its inputs before it raised is not run again; its error propagates. ``always``: guard every call
    (for graphs with varying sizes), not only calls until the first success. ``warn`` receives the error and may raise.

    If all fail, the error of the last is raised. Once the callable in use is known, ``fast_path_of`` names it.
    """
    in_use: Runner | None = None
    # With a graph, which is freed once the callable in use is known.
    ladder: list[Rung] = [functools.cache(rungs[0]), *rungs[1:]]

    def call(*args: Any) -> Any:
        nonlocal in_use
        if in_use is not None:
            return in_use(*args)
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
            warn(failed)
        if failed is not None or not always:
            in_use = run
            ladder.clear()
        return result

    return call if always else with_fast_path(call, lambda: in_use)


def with_fast_path(wrapper: Runner, fast_path: Callable[[], Runner | None]) -> Runner:
    """Let ``fast_path_of`` look through ``wrapper``: ``fast_path`` returns what later calls may call, None before."""
    setattr(wrapper, FAST_PATH, fast_path)
    return wrapper


def fast_path_of(run: Runner) -> Runner | None:
    """Return what later calls of ``run`` may call instead: ``run`` itself if it is no wrapper; None while open."""
    fast_path = getattr(run, FAST_PATH, None)
    return run if fast_path is None else fast_path()


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device is out of memory: the captured graph would need more."""
    return type(error).__name__ == "OutOfMemoryError"


def _versions(args: Sequence[Any]) -> list[int] | None:
    """Return the version counters of the tensors in ``args``; None if one has none."""
    given = [a for a in args if isinstance(a, Tensor)]
    return None if any(a.is_inference() for a in given) else [a._version for a in given]
