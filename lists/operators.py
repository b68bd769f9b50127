"""Does an operator exist, and which arguments has it? Asked of the running torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.read_toml import LONGEST_NAME, did_you_mean, nearest
from amp_graph.lists.schema import Operator, Rule

FOLDER = Path(__file__).parent


def check_op_exists(op: str, *, where: str = "") -> tuple[Operator, ...]:
    """Return the overloads that ``aten.linear`` or ``aten.linear.default`` names, or raise."""
    overloads = overloads_of(op)
    if overloads:
        return overloads
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    if overload and (siblings := overloads_of(f"{namespace}.{packet}")):
        names = [f"{namespace}.{packet}.{sibling._schema.overload_name or 'default'}" for sibling in siblings]
        what, legal = f"operator {op[:LONGEST_NAME]} has no such overload", ", ".join(names)
        near = names[0]
    else:
        known = known_names(namespace)
        what = f"unknown operator {op[:LONGEST_NAME]}{did_you_mean(op, known)}"
        legal = f"an operator registered in torch {torch.__version__}"
        if namespace not in ("aten", "torch"):
            legal += f"; import the library that registers {shortened(namespace)} first"
        # The operator of ``torch.special.erf`` is ``aten.special_erf``; that of others, their last name.
        path = op.removeprefix("torch.")
        spelled = [f"aten.{name}" for name in (path.replace(".", "_"), path.rpartition(".")[2])]
        near = next(filter(overloads_of, spelled), None) or next(iter(nearest(op, known)), "aten.linear")
    raise ListError(what, where=where, legal=legal, fix=f'op = "{near}"')


@lru_cache(maxsize=4096)
def _found(op: str) -> tuple[Operator, ...]:
    parts = op.split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() and part.isascii() for part in parts):
        return ()
    packet: Any = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    if not hasattr(packet, "overloads"):
        return ()
    names = packet.overloads()
    if len(parts) == 3:
        return (getattr(packet, parts[2]),) if parts[2] in names else ()
    return tuple(getattr(packet, name) for name in names)


def overloads_of(op: str) -> tuple[Operator, ...]:
    """Return the overloads of a packet, or the one named; empty where torch has none."""
    found = _found(op)
    if not found:
        # A library may register the operator later: do not remember its absence.
        _found.cache_clear()
    return found


def known_names(namespace: str) -> tuple[str, ...]:
    """Return operator names to suggest: what torch has resolved so far, and what the built-in lists name."""
    if not namespace.isidentifier() or not namespace.isascii():
        return ()
    attributes = vars(getattr(torch.ops, namespace)).items()
    resolved = {f"{namespace}.{name}" for name, one in attributes if hasattr(one, "overloads")}
    for path in FOLDER.glob("*.toml"):
        resolved.update(re.findall(rf'"({namespace}\.\w+)', path.read_text(encoding="utf-8")))
    return tuple(sorted(resolved))


def check_rules(rules: Sequence[Rule]) -> None:
    """Refuse rules for unknown operators, and `inputs` or `when` names that are no argument of them."""
    for rule in rules:
        overloads = check_op_exists(rule.op, where=rule.origin)
        legal = list(dict.fromkeys(a.name for overload in overloads for a in overload._schema.arguments))
        inputs = [("inputs", name) for name in rule.inputs or ()]
        for field, name in (*inputs, *(("when", name) for name, _ in rule.when)):
            if name not in legal:
                near = next(iter(nearest(name, legal)), legal[0])
                raise ListError(
                    f"{rule.op} has no argument {name!r}, named in `{field}`",
                    where=rule.origin,
                    legal=", ".join(legal),
                    fix=f'inputs = ["{near}"]' if field == "inputs" else f"when = {{ {near} = ... }}",
                )
