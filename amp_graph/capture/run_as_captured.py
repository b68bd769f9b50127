"""Falls back to the captured graph when the rewritten graph raises.

Before: one of our kernels raises on its first call. After: this call and all later ones run as captured, and the
report names the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.capture.dynamo_backend import lower
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.passes.torch_compat.dynamo_entries import SETTLED
from amp_graph.policy import Policy


def plain_runner(gm: GraphModule, policy: Policy, region: tuple[str, torch.dtype] | None = None) -> Runner:
    """Return a callable that runs ``gm`` as captured: in full precision, or in the autocast region of its capture."""
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
    """Wrap ``run``: once it raises and the callable from ``as_captured`` succeeds, that one runs instead.

    A call that wrote its inputs before it raised is not run again; its error propagates. ``always``: guard every call
    (for graphs with varying sizes), not only calls until the first success. ``tell`` receives the error and may raise.

    If both fail, the captured graph's error is raised. Once the callable in use is known, ``settled`` names it.
    """
    found: Runner | None = None  # the callable in use, once known
    spare: Callable[[], Runner] | None = as_captured  # it references a graph, which can be freed now
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
