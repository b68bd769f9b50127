"""Lays one list over another: built-in < file < argument, the later wins.

An unconditional entry replaces all that earlier lists said of the operator, its overloads and its in-place
form; a conditional one is asked before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from amp_graph.lists.errors import ListError
from amp_graph.lists.operators import check_rules, general_names
from amp_graph.lists.parse import ListFile, normalise
from amp_graph.lists.read_toml import did_you_mean
from amp_graph.lists.schema import OpClass, OpList, Rule

_Rules = dict[str, tuple[Rule, ...]]


def lay_over(base: OpList, file: ListFile) -> OpList:
    """Return `base` with a file's removals, rules and module rules applied."""
    rules = dict(base.rules)
    for op, origin in file.remove:
        _remove(rules, op, origin)
    _add(rules, file.rules)
    return replace(
        base,
        name=file.name,
        unlisted=file.unlisted or base.unlisted,
        rules=rules,
        modules=(*file.modules, *base.modules),
        description=file.description,
    )


def merge(base: OpList, *, remove: Iterable[str] = (), **classes: Iterable[str]) -> OpList:
    """Return `base` with operators put into other classes: ``deny=["gelu", "aten.tanh"]``."""
    for argument, names in (*classes.items(), ("remove", remove)):
        if isinstance(names, str):
            where = f"argument {argument}="
            raise ListError(f"{argument}={names!r} is a string", where=where, fix=f'{argument}=["{names}"]')
    new = [_rule(OpClass(cls), name) for cls, names in classes.items() for name in names]
    _check_contradictions(new)
    check_rules(new)
    rules = dict(base.rules)
    for name in remove:
        _remove(rules, normalise(name), "argument remove=")
    _add(rules, new)
    return replace(base, rules=rules)


def _rule(cls: OpClass, name: str) -> Rule:
    return Rule(op=normalise(name), cls=cls, why=f"you asked for it: {cls}={name!r}", origin=f"argument {cls}=")


def _check_contradictions(rules: Sequence[Rule]) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.op, rule)
        if first.cls is not rule.cls:
            raise ListError(
                f"{rule.op} is asked for twice: {first.cls} and {rule.cls}",
                where=rule.origin,
                legal="one class for an operator",
                fix=f'{rule.cls}=["{rule.op}"]',
            )


def _remove(rules: _Rules, op: str, origin: str) -> None:
    gone = [key for key in rules if op in general_names(key)]
    if not gone:
        near = did_you_mean(op, rules)
        raise ListError(
            f"nothing to remove: no entry for {op}{near}",
            where=origin,
            legal="an operator that the extended list names",
            fix='[remove]\nops = ["aten.exp"]',
        )
    for key in gone:
        del rules[key]


def _add(rules: _Rules, new: Sequence[Rule]) -> None:
    """Group by operator first: the entries of one list are laid over the earlier lists together."""
    if not new:
        return
    groups: _Rules = {}
    for rule in new:
        groups[rule.op] = (*groups.get(rule.op, ()), rule)
    covered: dict[str, list[str]] = {}
    for key in rules:
        for general in general_names(key):
            covered.setdefault(general, []).append(key)
    for op, group in groups.items():
        is_whole = any(not rule.when for rule in group)
        for key in covered.get(op, ()):
            if key != op and key in groups:
                continue  # a list's own overload and in-place entries stand beside its packet entry
            if is_whole:
                rules.pop(key, None)
            elif key != op and key in rules:
                rules[key] = _ordered((*group, *rules[key]))
        rules[op] = _ordered((*group, *rules.get(op, ())))


def _ordered(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Put conditional rules first, and drop a later repetition of one condition."""
    first: dict[object, Rule] = {}
    for rule in rules:
        first.setdefault(rule.when, rule)
    return tuple(sorted(first.values(), key=lambda rule: not rule.when))
