"""Gathers in low precision what a sharded model's graphs read in low precision alone.

Before: ``fully_shard(amp_graph.convert(part, "bf16"))``, which gathers fp32 and casts after it. After: weights that
only low operations read are cast on the shard and gathered in bf16, in the same collective as the fp32 norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.nn import Module

from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, INPUT
from amp_graph.passes.torch_compat.fully_sharded import (
    agreed,
    gather_in,
    gathered_bytes,
    is_at_rest,
    records_of,
    sum_in_fp32,
)
from amp_graph.policy_words import word_of
from amp_graph.rewrite import Rewritten


class LowGathers:
    """The dtypes in which the unit of ``model`` is gathered, by what its graphs read.

    FSDP gathers before the forward is called, so the first call has all in fp32. At its calls 2, 4, 8, ... the ranks of
    the unit agree on what every graph of every rank casts to low precision. It comes so from the next call on before
    which no gradient waits for its reduction, and anything else in fp32. Gradients are summed and reduced in fp32.
    """

    def __init__(self, model: Module, forget: Callable[[], None]) -> None:
        """Watch the gathers of ``model``, to which ``fully_shard`` was applied.

        ``forget`` is called when they change: graphs that were captured for other dtypes do not run again.
        """
        self.model, self.forget = model, forget
        self.dtype = torch.bfloat16  # the low one, which each graph tells
        self.low: set[str] = set()  # what a graph reads so alone
        self.full: set[str] = set()  # what a graph reads in fp32
        self._wanted: set[str] = set()  # in low precision, by all ranks
        self._gathered: set[str] = set()  # in low precision, now
        self._calls, self._is_new, self._is_on = 1, False, True  # the first call runs
        first = model.register_forward_pre_hook(self._before_gather, prepend=True)  # before FSDP's
        self._hooks = [first, model.register_forward_pre_hook(self._behind_gather)]

    def learn(self, rewritten: Rewritten) -> None:
        """Note which parameters a graph reads in low precision alone."""
        parameters, self.dtype = dict(self.model.named_parameters()), rewritten.dtype
        for node in rewritten.gm.graph.find_nodes(op="placeholder"):
            name = str(node.meta.get(INPUT))
            if name in parameters:
                (self.low if _reads_low(node, self.dtype) else self.full).add(name)

    def stop(self) -> None:
        """Gather all in fp32 again; on all ranks at once, as a collective."""
        self._wanted, self._is_on = set(), False
        self._change()
        for hook in () if self._gathered else self._hooks:  # else they change it later
            hook.remove()

    def _before_gather(self, module: Module, args: Any) -> None:
        self._calls += 1
        if self._is_on and self._calls.bit_count() == 1:
            self._wanted = agreed(records_of(module), self.low - self.full)
        self._change()

    def _change(self) -> None:
        """Change the dtypes of gathers to those that are wanted, once no gradient would be lost by it."""
        # FSDP would make an inference tensor of what it gathers anew.
        if self._wanted != self._gathered and not torch.is_inference_mode_enabled() and is_at_rest(self.model):
            for name, record in records_of(self.model).items():
                if (name in self._wanted) != (name in self._gathered):
                    gather_in(record, self.dtype if name in self._wanted else None)
            self._gathered, self._is_new = self._wanted, True
            self.forget()

    def _behind_gather(self, module: Module, args: Any) -> None:
        if self._is_new:
            self._is_new = False
            for name, record in records_of(module).items():
                if name in self._gathered:
                    sum_in_fp32(record)

    def lines(self) -> list[str]:
        """Return what a report tells of the unit's gathers."""
        records = records_of(self.model)
        kept = [name for name in records if name not in self._gathered]
        dtypes = {name: torch.float32 if name in kept else self.dtype for name in records}
        low, full = gathered_bytes(records, dtypes), gathered_bytes(records, dict.fromkeys(records, torch.float32))
        count = f"{len(self._gathered)} of {len(records)} parameters in {word_of(self.dtype)}"
        rest = f"; in fp32, as a graph reads them so: {', '.join(kept)}" if kept and self._gathered else ""
        return [f"fully_shard gathers {count}, {low} bytes for {full}, and reduces gradients in fp32{rest}"]


def _reads_low(node: Node, dtype: torch.dtype) -> bool:
    """Say whether all that reads a parameter reads it in ``dtype``."""
    if value(node).dtype == dtype:  # gathered so; who wants fp32 upcasts it
        return not any(user.op == "call_method" and user.target == "float" for user in node.users)
    return bool(node.users) and all(CAST in user.meta and value(user).dtype == dtype for user in node.users)
