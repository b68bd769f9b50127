"""TOML text to rules, and back: ``[[op]]`` tables become `Rule`s which know the line they were written on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.path_pattern import LEGAL, PatternError, check_pattern
from amp_graph.lists.read_toml import Lines, check_keys, choice, read_toml, string, strings, table, tables
from amp_graph.lists.schema import KINDS, PRECISIONS, Kind, ModuleRule, OpClass, OpList, Rule

DTYPES = ("bfloat16", "float16", "any")
DEVICES = ("cpu", "cuda", "any")
UNLISTED = ("opaque", "native")
_TOP_KEYS = ("list", "op", "remove", "module")
_LIST_KEYS = ("name", "dtype", "device", "unlisted", "extends", "description")
_OP_KEYS = ("op", "class", "why", "source", "inputs", "promotes", "one_dtype", "when", "policy", "since", "until")
_MODULE_KEYS = ("path", "precision", "why")
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
    check_keys(data, _TOP_KEYS, lambda key: lines.at(key), "the file", _OP_SNIPPET)
    head = table(data.get("list", {}), lines.at("list"), '[list]\nname = "mine"\nextends = "default"')
    check_keys(head, _LIST_KEYS, lambda key: lines.at("list", quoted=key), "[list]", '[list]\nname = "mine"')
    rules = tuple(_rules(data.get("op", []), lines))
    _check_duplicates(rules)
    stem = re.sub(r"\.toml$", "", file.replace("\\", "/").rsplit("/", 1)[-1])
    extends = head.get("extends")
    return ListFile(
        name=string(head, "name", lines.at("list"), '[list]\nname = "mine"', default=stem),
        dtype=choice(head, "dtype", DTYPES, lines, "any"),
        device=choice(head, "device", DEVICES, lines, "any"),
        unlisted=choice(head, "unlisted", UNLISTED, lines, ""),
        extends=None if extends is None else strings(extends, "extends", lines.at("list"), 'extends = "default"'),
        description=string(head, "description", lines.at("list"), 'description = "..."', default=""),
        rules=rules,
        modules=tuple(_modules(data.get("module", []), lines)),
        remove=tuple(_removals(data.get("remove", {}), lines)),
    )


def _rules(entries: object, lines: Lines) -> Iterator[Rule]:
    for index, entry in enumerate(tables(entries, "op", lines, _OP_SNIPPET)):
        where = lines.at("op", index)
        check_keys(entry, _OP_KEYS, partial(lines.at, "op", index), "[[op]]", _OP_SNIPPET)
        if "op" not in entry:
            raise ListError("an [[op]] without `op`", where=where, fix=_OP_SNIPPET)
        names = strings(entry["op"], "op", where, _OP_SNIPPET)
        cls = entry.get("class")
        if cls not in [c.value for c in OpClass]:
            what = f"unknown class {shortened(cls)}" if "class" in entry else "an [[op]] without `class`"
            legal = ", ".join(OpClass)
            raise ListError(what, where=lines.at("op", index, "class"), legal=legal, fix=_OP_SNIPPET)
        if not string(entry, "why", where, _OP_SNIPPET, default="").strip():
            raise ListError(
                f"{names[0][:200]} has no `why`", where=where, legal="one sentence a user can read", fix=_OP_SNIPPET
            )
        for name in names:
            yield _rule(entry, name, lines.at("op", index, f'"{name}"'))


def _rule(entry: Mapping[str, object], name: str, where: str) -> Rule:
    inputs = entry.get("inputs")
    return Rule(
        op=normalise(name),
        cls=OpClass(entry["class"]),
        why=str(entry["why"]),
        source=string(entry, "source", where, 'source = "..."', default=""),
        inputs=None if inputs is None else strings(inputs, "inputs", where, 'inputs = ["input"]'),
        promotes=_flag(entry, "promotes", where),
        one_dtype=_flag(entry, "one_dtype", where),
        when=_when(entry.get("when", {}), where),
        origin=where,
        policy=string(entry, "policy", where, 'policy = "fp32"', default=""),
        since=_version(entry, "since", where),
        until=_version(entry, "until", where),
    )


def _flag(entry: Mapping[str, object], key: str, where: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise ListError(f"{key} = {shortened(value)}", where=where, legal="true, false", fix=f"{key} = true")
    return value


def _version(entry: Mapping[str, object], key: str, where: str) -> str:
    fix = f'{key} = "2.12"'
    version = string(entry, key, where, fix, default="")
    if version and not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", version):
        raise ListError(f"{key} = {shortened(version)}", where=where, legal='"MAJOR.MINOR" of torch', fix=fix)
    return version


def normalise(name: str) -> str:
    """``gelu``, ``aten::gelu`` and ``torch.ops.aten.gelu`` are all ``aten.gelu``."""
    name = name.strip().removeprefix("torch.ops.").replace("::", ".")
    return name if "." in name else f"aten.{name}"


def _when(conditions: object, where: str) -> tuple[tuple[str, object], ...]:
    snippet = 'when = { exponent = { kind = "integer" } }'
    return tuple((key, _condition(value, where)) for key, value in table(conditions, where, snippet).items())


def _condition(value: object, where: str) -> object:
    if isinstance(value, list):
        return tuple(_condition(one, where) for one in value)
    if isinstance(value, (str, bool, int, float)):
        return value
    if not isinstance(value, dict) or set(value) != {"kind"} or value["kind"] not in KINDS:
        raise ListError(
            f"unknown condition {shortened(value)}",
            where=where,
            legal=f"a value, a list of values, or {{ kind = ... }} with {', '.join(KINDS)}",
            fix='when = { exponent = { kind = "integer" } }',
        )
    return Kind(value["kind"])


def _modules(entries: object, lines: Lines) -> Iterator[ModuleRule]:
    for index, entry in enumerate(tables(entries, "module", lines, _MODULE_SNIPPET)):
        where = lines.at("module", index)
        check_keys(
            entry,
            _MODULE_KEYS,
            partial(lines.at, "module", index),
            "[[module]]",
            _MODULE_SNIPPET,
        )
        values = {key: string(entry, key, where, _MODULE_SNIPPET, default="") for key in _MODULE_KEYS}
        yield module_rule(values["path"], values["precision"], values["why"], where)


def _removals(entry: object, lines: Lines) -> Iterator[tuple[str, str]]:
    where = lines.at("remove")
    content = table(entry, where, _REMOVE_SNIPPET)
    check_keys(content, ("ops",), lambda key: lines.at("remove", quoted=key), "[remove]", _REMOVE_SNIPPET)
    for name in strings(content.get("ops", []), "ops", where, _REMOVE_SNIPPET):
        yield normalise(name), lines.at("remove", quoted=f'"{name}"')


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
                fix=f'[[op]]\nop = "{rule.op}"\nclass = "{first.cls}"\nwhy = "..."',
            )


def module_rule(path: str, precision: str, why: str, origin: str) -> ModuleRule:
    """Check and build a module rule."""
    if precision not in PRECISIONS:
        legal = ", ".join(PRECISIONS)
        raise ListError(f"unknown precision {shortened(precision)}", where=origin, legal=legal, fix=_MODULE_SNIPPET)
    if not path or not why.strip():
        missing = "why" if path else "path"
        raise ListError(f"a [[module]] without `{missing}`", where=origin, fix=_MODULE_SNIPPET)
    try:
        check_pattern(path)
    except PatternError as error:
        what = f"bad regex {shortened(path)}: {error.what}"
        raise ListError(what, where=origin, legal=LEGAL, fix=_MODULE_SNIPPET) from error
    return ModuleRule(path, precision, why, origin)


def dump(op_list: OpList) -> str:
    """Return the whole list, with all extended lists merged, as the text of a TOML file."""
    head = {
        "name": op_list.name,
        "dtype": op_list.dtype,
        "device": op_list.device,
        "unlisted": op_list.unlisted,
    }
    tables = ["[list]", *(f"{key} = {_toml(value)}" for key, value in head.items()), "extends = []"]
    if op_list.description:
        tables.append(f"description = {_toml(op_list.description)}")
    for rule in op_list:
        tables += ["", "[[op]]", *_rule_text(rule)]
    for module in op_list.modules:
        tables += ["", "[[module]]", *_module_text(module)]
    return "\n".join(tables) + "\n"


def _rule_text(rule: Rule) -> Iterator[str]:
    yield f"op = {_toml(rule.op)}"
    yield f"class = {_toml(str(rule.cls))}"
    yield f"why = {_toml(rule.why)}"
    for key in ("source", "policy", "since", "until", "promotes", "one_dtype"):
        if value := getattr(rule, key):
            yield f"{key} = {_toml(value)}"
    if rule.inputs is not None:
        yield f"inputs = {_toml(rule.inputs)}"
    if rule.when:
        yield f"when = {{ {', '.join(f'{name} = {_toml(condition)}' for name, condition in rule.when)} }}"


def _module_text(module: ModuleRule) -> Iterator[str]:
    for key in ("path", "precision", "why"):
        yield f"{key} = {_toml(getattr(module, key))}"


def _toml(value: object) -> str:
    if isinstance(value, Kind):
        return f"{{ kind = {_toml(value.name)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # A JSON string, number or boolean is a TOML one.
    return json.dumps(value)
