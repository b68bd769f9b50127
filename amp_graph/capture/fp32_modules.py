"""Modules that the policy keeps in fp32, where their callers escaped capture and run under ``torch.autocast``.

Before: ``self.head(x)`` under autocast multiplies in low precision. After: with autocast off, on ``x`` in fp32.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from amp_graph.lists.path_pattern import matches
from amp_graph.passes.torch_compat.dynamo_frames import not_captured
from amp_graph.passes.torch_compat.module_attributes import plain_attribute
from amp_graph.policy import HALVES, Policy

FULL = "full"


def kept_in_fp32(model: torch.nn.Module, policy: Policy, device: str) -> list[torch.nn.Module]:
    """Return the outermost modules of ``model`` that are to stay fp32, by ``policy`` or by their own wish."""
    rules = [policy.keep_fp32] if policy.keep_fp32 else []
    rules += [rule.path for rule in policy.op_list(device).modules if rule.precision == FULL]
    kept: list[torch.nn.Module] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        named = any(matches(rule, path) for rule in rules)
        if id(module) not in inside and (named or plain_attribute(module, "amp_precision") == FULL):
            kept.append(module)
            inside |= set(map(id, module.modules()))
    return kept


class KeptModules:
    """Stands in front of the forward of modules that stay fp32, while a call runs in pieces, and only then.

    In between nothing of it is there to be seen: copies, pickles and other callers find the modules as they are.
    """

    def __init__(self, modules: list[torch.nn.Module], kind: str) -> None:
        self._forwards = [(module, _in_fp32(module.forward, kind)) for module in modules]
        self._before: list[Any] = []
        self._calls, self._lock = 0, threading.Lock()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stand there until the last of the calls that run at the same time has returned."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._stand()
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._leave()

    def _stand(self) -> None:
        self._before = [module.__dict__.get("forward") for module, _ in self._forwards]
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def _leave(self) -> None:
        for (module, _), before in zip(self._forwards, self._before, strict=True):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


def _in_fp32(forward: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return ``forward`` with autocast off and its inputs in fp32, where it is called and not captured."""

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # as part of a graph, whose plan keeps it
            return forward(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
            return forward(*args, **kwargs)

    return not_captured(in_fp32)


@not_captured  # a graph of ours is none of the model's
def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
