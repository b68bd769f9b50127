"""AMP9xx: gradients that ranks add up in low precision, and layers of a model over ranks that differ in dtype.

Before: ``fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))``. After: AMP904, as gradients
are then reduced in bfloat16, too.

The reductions of DDP and FSDP are operators of c10d, and are seen as any others. The line is that of DDP, or of its
hook; of FSDP it is that of backward: to hear its calls would import it, which takes a second.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from amp_graph.audit.codes import finding
from amp_graph.audit.records import LOW, NOWHERE, Call, Event, Finding, Place, Totals, Watcher, dtype_name, tensors_in
from amp_graph.passes.graph.graph_text import grouped
from amp_graph.passes.torch_compat.fully_sharded import dtype_of, every_group, records_of

NAMESPACES = ("c10d.", "_c10d_functional.")
BITS = {"bfloat16": 8, "float16": 11}  # of a significand
Cause = tuple[str, Place, str]  # of low reductions: the code, the line, and the hook or the policy that asks for it
FIX_OF_SHARDED = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
TEXTS = {
    "AMP901": ("by a collective of the script", "reduce in float32, and cast the result"),
    "AMP902": (
        "by the communication hook {who} of DistributedDataParallel",
        "leave the hook out, where the network allows it",
    ),
    "AMP903": (
        "by DistributedDataParallel, as the parameters are",
        "keep parameters in float32 under autocast, or a hook that reduces in float32",
    ),
    "AMP904": ("by fully_shard, whose policy {who}", FIX_OF_SHARDED),
}


@dataclass(eq=False)
class Reductions(Watcher):
    """Looks at collectives, and at the models that DDP and FSDP wrapped."""

    _models: weakref.WeakKeyDictionary[Module, Place] = field(default_factory=weakref.WeakKeyDictionary)  # of wrapping
    _hooks: weakref.WeakKeyDictionary[Module, Cause] = field(default_factory=weakref.WeakKeyDictionary)
    _reduced: dict[tuple[Cause, str], Totals] = field(default_factory=lambda: defaultdict(Totals))  # by dtype
    _backward: Place = NOWHERE  # the line of this step's
    _sharded: Place = NOWHERE  # the line of the last
    _ranks: int = 1
    _odd: dict[str, list[Finding]] = field(default_factory=dict)  # unlike their sisters, by the name of their model

    def heard(self, event: Event) -> None:
        """Remember where models were wrapped, and where backward began."""
        if event.name == "backward":
            self._backward = self._sharded = event.place
        elif event.name == "ddp" and event.is_after:
            self._models[event.arguments["self"]] = event.place
        elif event.name == "ddp.hook" and event.is_after:
            name = getattr(event.arguments["hook"], "__name__", "of its own")
            self._hooks[event.arguments["self"]] = "AMP902", event.place, name

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count a reduction of gradients."""
        if not call.operator.startswith(NAMESPACES) or "reduce" not in call.operator or not call.inputs:
            return
        self._ranks = torch.distributed.get_world_size()
        low = next((d for d in call.inputs if d in LOW), "")
        tensors = tensors_in((args, kwargs))
        numbers = max(t.numel() for t in tensors)
        by_hand = call.phase == "forward" and call.module == "" and self._backward != NOWHERE and numbers > 1
        if low and (call.phase == "backward" or by_hand):
            totals = self._reduced[self._cause(call), low]
            totals.calls, totals.bytes = totals.calls + 1, totals.bytes + numbers * tensors[0].element_size()

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the next step: what is reduced before its backward is no gradient."""
        self._backward = NOWHERE
        self._compare_sisters()

    def findings(self) -> Iterator[Finding]:
        """Yield the low reductions, and sisters in different dtypes."""
        for ((code, place, who), dtype), totals in self._reduced.items() if self._ranks > 1 else ():
            by, fix = TEXTS[code]
            asked = code == "AMP902" or "reduces in" in who
            count, size = totals.calls / self.training.looks, totals.bytes / self.training.looks
            yield finding(
                code, place,
                f"gradients are added up over {self._ranks} ranks in {dtype}, "
                f"{by.format(who=who)}: {count:g} reductions a step, "
                f"{size / 1e6:.3g} MB; each addition rounds to {BITS[dtype]} bits",
                fix,
                level="note" if asked else "warning", ranks=self._ranks, dtype=dtype, reductions=count,
                bytes=size,
            )  # fmt: skip
        self._compare_sisters()
        for odd in self._odd.values():
            yield from odd

    def _cause(self, call: Call) -> Cause:
        """Return what reduces: in backward, a hook of DDP, DDP itself or FSDP; else the script."""
        if call.phase == "backward":
            models = list(self.training.models)
            parallel = [m for m in models if isinstance(m, DistributedDataParallel)]
            if "scatter" not in call.operator and parallel:
                hook = next((self._hooks[m] for m in parallel if m in self._hooks), None)
                known = next((self._models[m] for m in parallel if m in self._models), self._backward)
                return ("AMP903", known, "") if hook is None else hook
            if groups := [group for m in models for group in every_group(m)]:
                return "AMP904", self._backward, _words(groups[0].mp_policy)
        return "AMP901", call.place if call.place != NOWHERE else self._backward, ""

    def _compare_sisters(self) -> None:
        """Compare the layers of the models that are there: those of a function are gone when it has returned."""
        self._odd |= {name: list(self._sisters(model)) for model, name in list(self.training.models.items())}

    def _sisters(self, model: Module) -> Iterator[Finding]:
        """Yield the parameters of a model over ranks whose dtype is not that of the same one in other layers."""
        dtypes, what = _dtypes_over_ranks(model)
        groups = grouped((re.sub(r"\b\d+\b", "*", name), (dtype, name)) for name, dtype in dtypes.items())
        place = self._models.get(model, self._sharded)
        for name, pairs in groups.items():
            if len(found := grouped(pairs)) > 1:
                most, *others = sorted(found, key=lambda dtype: -len(found[dtype]))
                odd = [one for dtype in others for one in found[dtype]]
                yield finding(
                    "AMP905", place,
                    f"{', '.join(odd[:3])}{' and others' if len(odd) > 3 else ''}: {what} {' and '.join(others)}, and "
                    f"the other {len(found[most])} of {name} {most}",
                    "give all layers of a kind one dtype, and one policy",
                    also=odd, name=name,
                    dtypes={dtype: len(names) for dtype, names in found.items()},
                )  # fmt: skip


def _dtypes_over_ranks(model: Module) -> tuple[dict[str, str], str]:
    """Return the dtype of each parameter of a model that is spread over ranks; none of any other."""
    if groups := every_group(model):
        records = {name: record for group in groups for name, record in records_of(group).items()}
        return {name: dtype_name(dtype_of(record)) for name, record in records.items()}, "gathered in"
    if isinstance(model, DistributedDataParallel):
        return {name: dtype_name(p.dtype) for name, p in model.module.named_parameters()}, "held in"
    return {}, ""


def _words(policy: Any) -> str:
    """Say what a MixedPrecisionPolicy does about reductions."""
    reduced, gathered = getattr(policy, "reduce_dtype", None), getattr(policy, "param_dtype", None)
    if reduced is not None:
        return f"reduces in {str(reduced).removeprefix('torch.')}"
    if gathered is not None:
        return f"names param_dtype={str(gathered).removeprefix('torch.')} and no reduce_dtype"
    return "names no dtype, so it reduces in that of the parameters"
