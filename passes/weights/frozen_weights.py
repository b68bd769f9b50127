"""What a frozen model reads in place of its weights: low copies, packed and folded forms, made once.

Before: ``w = weight.bfloat16()`` at each call. After: ``w = frozen_weight(weight)``, made again only if torch shows
that ``weight`` was written: another version, other memory, another tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.grad_regions import may_record_gradients
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.registry import own_functions, reads_frozen_weight
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.storage import bytes_of
from amp_graph.passes.weights.cast_weights import casts_of_parameters

own_functions(__name__, frozen_weights=True)


@dataclass(frozen=True)
class Kept:
    """What was made of ``sources``, aliases of tensors that had these ``versions``, with ``facts`` by value."""

    made: Any
    sources: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    facts: Any

    def is_of(self, sources: Sequence[Tensor | None], facts: Any) -> bool:
        """Say whether nothing has shown a write since. Aliases hold their memory, so that no other tensor gets it."""
        for alias, version, source in zip(self.sources, self.versions, sources, strict=True):
            if source is None or alias is None:
                if source is not alias:
                    return False
            elif source._version != version or not source.is_set_to(alias):
                return False
        return bool(self.facts == facts)


class FrozenWeights:
    """The low copies and packed forms of one frozen model; ``written``: weights whose forms were made again.

    Only parameters of the model have them: others are cast at each call.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.written: list[str] = []
        self._model = weakref.ref(model)
        self._kept: dict[tuple[Any, int], Kept] = {}
        self._names: dict[int, str] = {}  # of an unpickled model no parameters exist yet
        self.read = self._reader()

    def _named(self) -> dict[int, str]:
        model = self._model()
        return {} if model is None else {id(p): name for name, p in model.named_parameters()}

    def form(
        self, kind: Any, make: Callable[[], Any], weight: Tensor, *others: Tensor | None, facts: Any = None
    ) -> Any:
        """Return what ``make`` made of ``weight`` and ``others``, and would make now; of this ``kind``.

        facts: what else it was made of, compared by value. None where nothing is kept for such a weight.
        """
        key = (kind, id(weight))
        kept = self._kept.get(key)
        if kept is not None and kept.is_of((weight, *others), facts):
            return kept.made
        sources = (weight, *others)
        if is_in_mode(weight) or any(s is not None and not may_be_frozen(s) for s in sources):
            return None
        self._names = self._names or self._named()
        is_new = id(weight) not in self._names
        if is_new:
            self._names = self._named()
            self._kept = {k: v for k, v in self._kept.items() if k[1] in self._names}
            if id(weight) not in self._names:  # of torch.func.functional_call
                return None
        if is_new or kept is not None:
            self.written.append(self._names[id(weight)])
        versions = tuple(None if s is None else s._version for s in sources)  # before the values
        with torch.inference_mode(False), torch.no_grad():
            aliases = tuple(None if s is None else s.detach() for s in sources)
            made = make()
        self._kept[key] = Kept(made, aliases, versions, facts)
        return made

    def _reader(self) -> Callable[[Tensor], Tensor]:
        """Return what graphs call."""

        def frozen_weight(weight: Tensor) -> Tensor:
            """Return ``weight`` in low precision."""
            found: Tensor | None = self.form("low", lambda: weight.detach().to(self.dtype), weight)
            return weight.to(self.dtype) if found is None else found

        return frozen_weight

    def drop(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._names = {}

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept."""
        made = [kept.made for kept in list(self._kept.values())]
        return [t for one in made for t in (one if isinstance(one, tuple) else (one,)) if isinstance(t, Tensor)]

    @property
    def bytes(self) -> int:
        """The bytes of ``tensors``."""
        return sum(map(bytes_of, self.tensors))


def may_be_frozen(tensor: Tensor) -> bool:
    """Say whether torch counts the writes to ``tensor``, a plain one."""
    plain = type(tensor) in (torch.nn.Parameter, Tensor) and tensor.layout is torch.strided
    return plain and tensor.is_leaf and not tensor.is_inference()


@dataclass(frozen=True)
class FreezeWeights(Pass):
    """Replaces ``weight.bfloat16()`` with ``frozen_weight(weight)`` in a frozen model.

    Law: the form is made anew when torch shows a write to the parameter. Exactness: bit-exact.
    """

    options: PipelineOptions

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every inserted cast of a parameter."""
        weights: FrozenWeights = self.options.frozen
        if may_record_gradients(gm):  # in a region that enables them
            return
        for node, reason in casts_of_parameters(gm, weights.dtype):
            if node.kwargs or len(node.args) > 1:  # into another layout
                continue
            if reason:
                yield Skip(node.name, f"cast at each call: {reason}")
                continue
            node.op, node.target = "call_function", weights.read
            yield Change(self.name, "frozen", node.name, "cast once")


def is_frozen(node: Node) -> bool:
    """Say whether ``node`` reads what a frozen model keeps in place of a weight."""
    return CAST in node.meta and reads_frozen_weight(node.target)
