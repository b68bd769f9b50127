"""What runs a call that a rewritten graph cannot run, though the graph as captured can.

Before: a kernel of ours raises on its first call. After: that call, and those that follow, run as captured, and the
report names the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.capture.dynamo_backend import Runner, lower
from amp_graph.policy import Policy


def plain_runner(gm: GraphModule, policy: Policy, region: tuple[str, torch.dtype] | None = None) -> Runner:
    """Return what runs ``gm`` as it was captured: in full precision, or in the region of autocast of its capture."""
    run = lower(gm, (), "eager", replace(policy, level="O0"))
    if region is None:
        return run
    kind, dtype = region

    def call(*args: Any) -> Any:
        with torch.autocast(kind, dtype):
            return run(*args)

    return call


def or_as_captured(
    run: Runner, as_captured: Callable[[], Runner], tell: Callable[[Exception], None], *, always: bool
) -> Runner:
    """Return ``run``, in whose place what ``as_captured`` returns runs once ``run`` has raised and that has not.

    A call whose inputs were written before the error came is not run again: the error is the caller's. ``always``:
    watch every call (of a graph whose sizes vary); otherwise only until the first that succeeds. ``tell`` is given the
    error, and may raise it.

    Raises what the graph as captured raises, where neither runs.
    """
    found: Runner | None = None  # what runs, once that is known
    spare: Callable[[], Runner] | None = as_captured  # it holds a graph, which is dropped with the need for it
    del as_captured

    def call(*args: Any) -> Any:
        nonlocal found, spare
        if found is not None:
            return found(*args)
        versions = _versions(args)
        try:
            result = run(*args)
        except Exception as error:
            if spare is None or is_out_of_memory(error) or versions is None or _versions(args) != versions:
                raise
            instead = spare()
            result = instead(*args)
            tell(error)
            found, spare = instead, None
        else:
            if not always:
                found, spare = run, None
        return result

    return call


def is_out_of_memory(error: Exception) -> bool:
    """Say whether a device has no memory left: the graph as captured would take more."""
    return type(error).__name__ == "OutOfMemoryError"


def _versions(args: Sequence[Any]) -> list[int] | None:
    """Return the version counters of the tensors among ``args``; None where one has none."""
    given = [a for a in args if isinstance(a, Tensor)]
    return None if any(a.is_inference() for a in given) else [a._version for a in given]
