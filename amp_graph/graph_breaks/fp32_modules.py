"""Keeps the policy's fp32 modules in fp32 when their callers are uncaptured and run under ``torch.autocast``.

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
from amp_graph.policy import Policy
from amp_graph.policy_words import HALVES

FULL = "full"


def kept_in_fp32(model: torch.nn.Module, policy: Policy, device: str) -> list[torch.nn.Module]:
    """Return the outermost modules of ``model`` that stay fp32 by ``policy`` or by ``amp_graph.precision``."""
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
    """Wraps the forward of modules that stay fp32, only while a call runs as partial graphs.

    Between such calls the modules are unchanged for copies, pickles and other callers.
    """

    def __init__(self, modules: list[torch.nn.Module], kind: str) -> None:
        self._forwards = [(module, _in_fp32(module.forward, kind)) for module in modules]
        self._before: list[Any] = []
        self._calls, self._lock = 0, threading.Lock()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Keep the wrappers until the last concurrent call has returned."""
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
    """Wrap ``forward`` to run with autocast off and fp32 inputs, unless it runs as part of a graph."""

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # part of a graph, whose plan keeps it in fp32
            return forward(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
            return forward(*args, **kwargs)

    return not_captured(in_fp32)


@not_captured  # a graph module of ours is no module of the model
def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
