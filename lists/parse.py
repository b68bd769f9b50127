"""TOML text to rules: ``[[op]]`` tables become `Rule`s which know the line they were written on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.path_pattern import LEGAL, PatternError, check_pattern
from amp_graph.lists.read_toml import FLAG, TABLE, TEXT, Lines, Takes, check_table, one_of, read_toml, tables
from amp_graph.lists.schema import PRECISIONS, ModuleRule, OpClass, Rule

DTYPES = ("bfloat16", "float16", "any")
DEVICES = ("cpu", "cuda", "any")


NAMES: Takes = (
    lambda value: all(isinstance(one, str) and one.strip() for one in _names(value)),
    "a name, or a list of names",
)
WHY: Takes = (lambda value: isinstance(value, str) and value.strip(), "one sentence a user can read")
VERSION: Takes = (
    lambda value: isinstance(value, str) and re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", value),
    '"MAJOR.MINOR" of torch',
)
FILE: dict[str, Takes] = dict.fromkeys(("list", "op", "remove", "module"), (lambda value: True, ""))
LIST = {
    "name": TEXT, "dtype": one_of(*DTYPES), "device": one_of(*DEVICES), "unlisted": one_of("opaque", "native"),
    "extends": NAMES, "description": TEXT,
}  # fmt: skip
OP = {
    "op": NAMES, "class": one_of(*map(str, OpClass)), "why": WHY, "source": TEXT, "inputs": NAMES, "promotes": FLAG,
    "one_dtype": FLAG, "when": TABLE, "policy": TEXT, "since": VERSION, "until": VERSION,
}  # fmt: skip
MODULE = {"path": NAMES, "precision": one_of(*PRECISIONS), "why": WHY}
_LIST_SNIPPET = '[list]\nname = "mine"\nextends = "default"'
_OP_SNIPPET = '[[op]]\nop = "aten.exp"\nclass = "deny"\nwhy = "overflows for inputs over 11"'
_MODULE_SNIPPET = '[[module]]\npath = ".*norm"\nprecision = "full"\nwhy = "its statistics need full precision"'
_REMOVE_SNIPPET = '[remove]\nops = ["aten.exp"]'


@dataclass(frozen=True, eq=False)
class ListFile:
    """One file, parsed, before it is merged over what it extends; equal to itself only, as each is read once."""

    name: str
    dtype: str
    device: str
    unlisted: str
    extends: tuple[str, ...] | None
    description: str
    rules: tuple[Rule, ...]
    modules: tuple[ModuleRule, ...]
    remove: tuple[tuple[str, str], ...]  # (operator, origin)


def parse(text: str, file: str) -> ListFile:
    """Read one list file, refusing what is not in the format; operators' existence is not checked here."""
    data = read_toml(text, file, _OP_SNIPPET)
    lines = Lines(text, file)
    check_table(data, FILE, "the file", lines.at, _OP_SNIPPET)
    head: Any = check_table(data.get("list", {}), LIST, "[list]", partial(lines.at, "list", 0), _LIST_SNIPPET)
    rules = tuple(_rules(data.get("op", []), lines))
    _check_duplicates(rules)
    return ListFile(
        name=head.get("name", re.sub(r"\.toml$", "", file.replace("\\", "/").rsplit("/", 1)[-1])),
        dtype=head.get("dtype", "any"),
        device=head.get("device", "any"),
        unlisted=head.get("unlisted", ""),
        extends=_names(head["extends"]) if "extends" in head else None,
        description=head.get("description", ""),
        rules=rules,
        modules=tuple(_modules(data.get("module", []), lines)),
        remove=tuple(_removals(data.get("remove", {}), lines)),
    )


def _names(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _rules(entries: object, lines: Lines) -> Iterator[Rule]:
    for index, given in enumerate(tables(entries, "op", lines.at("op"), _OP_SNIPPET)):
        at = partial(lines.at, "op", index)
        entry: Any = check_table(given, OP, "an [[op]]", at, _OP_SNIPPET, "op", "class", "why")
        when = tuple((key, _condition(value, at("when"))) for key, value in entry.get("when", {}).items())
        inputs = _names(entry["inputs"]) if "inputs" in entry else None
        rest = {key: value for key, value in entry.items() if key not in ("op", "class", "inputs", "when")}
        for name in _names(entry["op"]):
            origin = at(f'"{name}"')
            yield Rule(normalise(name), OpClass(entry["class"]), inputs=inputs, when=when, origin=origin, **rest)


def normalise(name: str) -> str:
    """``gelu``, ``aten::gelu`` and ``torch.ops.aten.gelu`` are all ``aten.gelu``."""
    name = name.strip().removeprefix("torch.ops.").replace("::", ".")
    return name if "." in name else f"aten.{name}"


def _condition(value: object, where: str) -> object:
    if isinstance(value, list):
        return tuple(_condition(one, where) for one in value)
    if isinstance(value, (str, bool, int, float)):
        return value
    if value == {"kind": "none"}:
        return None
    legal, fix = 'a value, a list of values, or { kind = "none" }', "when = { exponent = [2, 3] }"
    raise ListError(f"unknown condition {shortened(value)}", where=where, legal=legal, fix=fix)


def _modules(entries: object, lines: Lines) -> Iterator[ModuleRule]:
    for index, given in enumerate(tables(entries, "module", lines.at("module"), _MODULE_SNIPPET)):
        at = partial(lines.at, "module", index)
        entry: Any = check_table(given, MODULE, "a [[module]]", at, _MODULE_SNIPPET, *MODULE)
        try:
            check_pattern(entry["path"])
        except PatternError as error:
            what = f"bad regex {shortened(entry['path'])}: {error.what}"
            raise ListError(what, where=at("path"), legal=LEGAL, fix=_MODULE_SNIPPET) from error
        yield ModuleRule(**entry, origin=at())


def _removals(entry: object, lines: Lines) -> Iterator[tuple[str, str]]:
    at = partial(lines.at, "remove", 0)
    for name in _names(check_table(entry, {"ops": NAMES}, "[remove]", at, _REMOVE_SNIPPET).get("ops", [])):
        yield normalise(name), at(f'"{name}"')


def _check_duplicates(rules: tuple[Rule, ...]) -> None:
    """One file may hold many conditional entries for an operator, but only one without conditions."""
    seen: dict[tuple[str, object], Rule] = {}
    for rule in rules:
        first = seen.setdefault((rule.op, rule.when), rule)
        if first is not rule:
            raise ListError(
                f"{rule.op} has two entries: {first.cls} at {first.origin}, and {rule.cls} here",
                where=rule.origin,
                legal="one entry for an operator, or entries told apart by `when`",
                fix=f"remove the entry at {first.origin}, or give one of the two a `when`",
            )
