"""What an operator list says: one `Rule` per operator, one `OpList` per (dtype, device).

``op = "aten.exp"``, ``class = "deny"`` in a TOML file becomes ``Rule(op="aten.exp", cls=OpClass.DENY, ...)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PRECISIONS = ("full", "low")
Operator = Any  # an overload of an operator, such as ``torch.ops.aten.linear.default``


class OpClass(str, Enum):
    """How an operator treats precision."""

    ALLOW = "allow"  # runs in low precision, accumulates in full
    DENY = "deny"  # computes and returns full precision
    FP32_INSIDE = "fp32_inside"  # low in, low out, full inside
    FOLLOW = "follow"  # harmless; the planner chooses
    NEUTRAL = "neutral"  # moves or selects values; a cast commutes with it
    PROMOTE = "promote"  # all operands are cast to the widest of them
    OPAQUE = "opaque"  # runs exactly as captured

    def __str__(self) -> str:
        return self.value


def _holds(condition: object, value: object) -> bool:
    if condition is None:
        return value is None
    if isinstance(condition, tuple):
        return any(_holds(one, value) for one in condition)
    # ``True == 1`` in Python, and comparing a tensor yields a tensor: only plain values are equal.
    plain = isinstance(value, (str, bool, int, float))
    return plain and isinstance(condition, bool) == isinstance(value, bool) and bool(condition == value)


@dataclass(frozen=True)
class Rule:
    """One operator's class, and the reason for it."""

    op: str
    cls: OpClass
    why: str
    source: str = ""
    inputs: tuple[str, ...] | None = None
    promotes: bool = False
    one_dtype: bool = False  # where it is low, the arguments that `inputs` leaves out are cast too
    when: tuple[tuple[str, object], ...] = ()  # None: the argument is not given
    origin: str = ""
    policy: str = ""  # PyTorch autocast's own name for the policy, such as "fp32_set_opt_dtype"
    since: str = ""  # the first torch version that has this entry, such as "2.12"
    until: str = ""  # the last one

    def matches(self, arguments: Mapping[str, object]) -> bool:
        """Whether the arguments fulfil `when`; an argument that is not given counts as None."""
        return all(_holds(condition, arguments.get(name)) for name, condition in self.when)


@dataclass(frozen=True)
class ModuleRule:
    """The modules whose path matches a regular expression stay full, or run low, precision."""

    path: str
    precision: str
    why: str = ""
    origin: str = ""


@dataclass(frozen=True)
class OpList:
    """The rules in force for one dtype on one device, keyed by ``aten.linear`` or ``aten.linear.default``."""

    name: str
    dtype: str
    device: str
    unlisted: str
    rules: Mapping[str, tuple[Rule, ...]]
    modules: tuple[ModuleRule, ...] = ()
    description: str = field(default="", compare=False)

    def lookup(self, op: Operator, arguments: Mapping[str, object]) -> Rule | None:
        """Return the rule for a call of `op`: overload before packet before functional packet, or None."""
        for key in lookup_keys(op):
            for rule in self.rules.get(key, ()):
                if rule.matches(arguments):
                    return rule
        return None

    def says_the_same_of(self, ops: Iterable[Operator]) -> bool:
        """Say whether all of ``ops`` are of one class, or in no list."""
        rules = [self.lookup(op, {}) for op in ops]
        return len({None if rule is None else rule.cls for rule in rules}) == 1

    def __iter__(self) -> Iterator[Rule]:
        return (rule for rules in self.rules.values() for rule in rules)

    def __len__(self) -> int:
        return sum(map(len, self.rules.values()))


def lookup_keys(op: Operator) -> tuple[str, ...]:
    """Return the keys under which a rule for `op` may stand, most specific first."""
    return general_names(f"{op._schema.name.replace('::', '.')}.{op._schema.overload_name or 'default'}")


def general_names(op: str) -> tuple[str, ...]:
    """Return the entries that speak for `op`: itself, its packet, and the packet that it mutates for."""
    packet = ".".join(op.split(".")[:2])
    functional = functional_packet(packet)
    return tuple(dict.fromkeys((op, packet) if functional is None else (op, packet, functional)))


def functional_packet(packet: str) -> str | None:
    """``aten.relu_`` is the in-place form of ``aten.relu``; None for what is not an in-place name."""
    if packet.endswith("_") and not packet.endswith("__"):
        return packet[:-1]
    # aten.__iand__ is the in-place form of aten.__and__.
    return packet.replace(".__i", ".__") if ".__i" in packet else None
