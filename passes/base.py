"""The contract of a graph pass, and the result that it returns.

Before: ``gm``. After: ``PassResult(gm, changes, skips)``, where each change and each skip has a reason.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.lists import AmpGraphError


class PassError(AmpGraphError):
    """A pass failed; names the pass, the node and the user's line."""


class VerifyError(AmpGraphError):
    """A graph breaks the contract; names the node and the clause."""


@dataclass(frozen=True)
class Change:
    """One change by a pass: the rule, the action, the node's name, and the reason."""

    rule: str
    action: str
    node: str
    reason: str


@dataclass(frozen=True)
class Skip:
    """One node that a pass left unchanged, and the reason."""

    node: str
    reason: str


@dataclass(frozen=True)
class PassResult:
    """The graph after a pass, with its changes and skips."""

    gm: GraphModule
    changes: tuple[Change, ...] = field(default=())
    skips: tuple[Skip, ...] = field(default=())

    @property
    def modified(self) -> bool:
        """Whether the pass changed anything: derived, never set by hand."""
        return bool(self.changes)


class Writes(enum.Enum):
    """What a pass may do to operations that write to memory. Random draws always stay as they are."""

    KEPT = "all stay, in order"
    ABSORBED = "sums and relus in place may go, into what made the memory that they write to"
    OWN = "the pass may write to memory that the graph made itself; what is written to inputs stays"
    APPENDED = "all stay, in order; the pass adds others behind them"


class Pass:
    """A rewrite of one graph; a frozen dataclass whose fields are its options.

    Contract, checked by ``verify`` after each pass:

    * only the ``GraphModule`` given is changed; parameters are shared by identity, never copied;
    * every tensor node has truthful fake-tensor metadata in ``node.meta["val"]``;
    * inputs and outputs keep their names and, unless the pass declares ``changes_outputs``, their dtypes; one that
      declares ``adds_inputs`` may add inputs behind all others;
    * operations that draw random numbers or write to memory keep their order and number, except as declared by
      ``writes``.

    The manager, not the pass, lints, recompiles, verifies, times and wraps errors. If a pass raises or breaks the
    contract, the manager skips it for this graph, unless it is ``required``: without such a pass the graph would not be
    in mixed precision, or would be less exact than its policy promises.
    """

    name: ClassVar[str]  # that of its class: ``FuseGelu`` is "fuse-gelu"
    writes: ClassVar[Writes] = Writes.KEPT
    required: ClassVar[bool] = False
    adds_inputs: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Name a pass after its class."""
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    @property
    def changes_outputs(self) -> bool:
        """Whether the pass may change the dtypes of the graph's outputs."""
        return False

    def run(self, gm: GraphModule) -> PassResult:
        """Rewrite ``gm`` in place and say what changed."""
        told = list(self.rewrite(gm))
        changes = tuple(one for one in told if isinstance(one, Change))
        return PassResult(gm, changes, tuple(one for one in told if isinstance(one, Skip)))

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Rewrite ``gm`` in place and yield each change, and what stays as it is: what most passes define."""
        raise NotImplementedError
