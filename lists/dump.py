"""Writes a list as TOML that ``parse`` reads back as the same rules and heading."""

from __future__ import annotations

import json
from collections.abc import Iterator

from amp_graph.lists.schema import Kind, ModuleRule, OpList, Rule


def dump(op_list: OpList) -> str:
    """Return the whole list, with all extended lists merged, as the text of a TOML file."""
    head = {
        "name": op_list.name,
        "dtype": op_list.dtype,
        "device": op_list.device,
        "unlisted": op_list.unlisted,
    }
    tables = ["[list]", *(f"{key} = {_value(value)}" for key, value in head.items()), "extends = []"]
    if op_list.description:
        tables.append(f"description = {_value(op_list.description)}")
    for rule in op_list:
        tables += ["", "[[op]]", *_rule(rule)]
    for module in op_list.modules:
        tables += ["", "[[module]]", *_module(module)]
    return "\n".join(tables) + "\n"


def _rule(rule: Rule) -> Iterator[str]:
    yield f"op = {_value(rule.op)}"
    yield f"class = {_value(str(rule.cls))}"
    yield f"why = {_value(rule.why)}"
    for key in ("source", "policy", "since", "until", "promotes", "one_dtype"):
        if value := getattr(rule, key):
            yield f"{key} = {_value(value)}"
    if rule.inputs is not None:
        yield f"inputs = {_value(rule.inputs)}"
    if rule.when:
        yield f"when = {{ {', '.join(f'{name} = {_value(condition)}' for name, condition in rule.when)} }}"


def _module(module: ModuleRule) -> Iterator[str]:
    for key in ("path", "precision", "why"):
        yield f"{key} = {_value(getattr(module, key))}"


def _value(value: object) -> str:
    if isinstance(value, Kind):
        return f"{{ kind = {_value(value.name)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    # A JSON string, number or boolean is a TOML one.
    return json.dumps(value)
