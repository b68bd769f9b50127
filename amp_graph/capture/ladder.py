"""The ladder on which a captured graph runs: rewritten; as captured, under the policy's autocast; as captured, in fp32.

Before: one of our kernels raises on its first call. After: this call and all later ones run on the next rung, and the
report names the error.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.capture.dynamo_backend import lower
from amp_graph.lists.errors import Attempt
from amp_graph.model_state import ModelState
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


def on_ladder(rungs: Sequence[Rung], warn: Callable[[Exception], None]) -> Runner:
    """Run the first of ``rungs`` that does not raise; one that raises later has that call, and all after it, run below.

    The state is as after one call: what the first run wrote or drew is undone, and later ones where they only drew. A
    later run that wrote to its inputs before it raised is not repeated; its error propagates. ``warn`` receives the
    first error and may raise. If all fail, the error of the last is raised.

    Once the first call has run, ``fast_path_of`` names what later ones may call.
    """
    ladder: list[Rung] = [functools.cache(rung) for rung in rungs]
    run: Runner | None = None
    later: Callable[..., Any] | None = None

    def descend(args: tuple[Any, ...], before: Written | ModelState, error: Exception | None = None) -> Any:
        """Run a call on the first rung that does not raise, below the one in use if that raised ``error``."""
        nonlocal run
        first = error
        for rung in ladder[error is not None :]:
            if error is not None:
                if is_of_others(error) or before.is_lost():
                    break
                before.restore()
                traceback.clear_frames(error.__traceback__)  # they hold the user's regions open
            try:
                chosen = rung()
                result = chosen(*args)
            except Exception as another:
                error, first = another, first or another
                continue
            if first is not None:
                warn(first)
                del ladder[: ladder.index(rung)]
            run = chosen
            return result
        try:
            assert error is not None, "there is a rung"
            raise error
        finally:
            del error, first  # its frames, of which this is one, hold the user's regions open

    def call(*args: Any) -> Any:
        nonlocal later
        if later is not None:
            return later(*args)
        written = Written(range(len(args)), args)
        with Attempt() as copied:  # of a value that cannot be copied, or for which there is no memory
            before = ModelState(torch.nn.Module(), list(args), weights=False)  # of no model: of what is given
        result = descend(args, written if copied.error is not None else before)
        later = partial(once, written.changed(), written.has_drawn())
        return result

    def once(places: Sequence[int], draws: bool, *args: Any) -> Any:
        before = Written(places, args, draws=draws) if places or draws else NOTHING
        try:
            return run(*args)  # type: ignore[misc]  # it is known by now
        except Exception as error:
            return descend(args, before, error)

    return with_fast_path(call, lambda: later)


class Written:
    """The state before a call of a graph that writes or draws: what it wrote cannot be undone, what it drew can."""

    def __init__(self, places: Iterable[int], args: Sequence[Any], *, draws: bool = True) -> None:
        """Read the random state if the graph ``draws``, and the version counters of the tensors at ``places``."""
        given = [(i, args[i]) for i in places if isinstance(args[i], Tensor) and not args[i].is_inference()]
        self.versions = [(i, t, t._version) for i, t in given]
        self.random = torch.get_rng_state() if draws else None

    def changed(self) -> list[int]:
        """Return the places of what was written to since."""
        return [i for i, tensor, version in self.versions if tensor._version != version]

    def is_lost(self) -> bool:
        """Say whether an input was written to, which cannot be undone."""
        return bool(self.changed())

    def has_drawn(self) -> bool:
        """Say whether random numbers were drawn since."""
        return self.random is not None and not torch.equal(self.random, torch.get_rng_state())

    def restore(self) -> None:
        """Restore the random state."""
        if self.random is not None:
            torch.set_rng_state(self.random)


NOTHING = Written((), (), draws=False)  # before a call of a graph that neither writes to its inputs nor draws


def with_fast_path(wrapper: Runner, fast_path: Callable[[], Runner | None]) -> Runner:
    """Let ``fast_path_of`` look through ``wrapper``: ``fast_path`` returns what later calls may call, None before."""
    setattr(wrapper, FAST_PATH, fast_path)
    return wrapper


def fast_path_of(run: Runner) -> Runner | None:
    """Return what later calls of ``run`` may call instead: ``run`` itself if it is no wrapper; None while open."""
    fast_path = getattr(run, FAST_PATH, None)
    return run if fast_path is None else fast_path()


def is_of_others(error: Exception) -> bool:
    """Say whether an error is none of ours: a device is out of memory, or a checkpoint has recomputed enough."""
    return type(error).__name__ in ("OutOfMemoryError", "_StopRecomputationError")
