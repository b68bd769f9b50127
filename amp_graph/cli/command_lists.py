"""``amp-graph lists``: prints the class of an operation, the list that sets it, and why."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from amp_graph.cli.terminal import Told
from amp_graph.errors import AmpGraphError, ListError
from amp_graph.lists import OpList, Rule, check_op_exists
from amp_graph.lists.parse import normalise
from amp_graph.lists.schema import lookup_keys
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.policy import Policy

Row = dict[str, Any]
ALWAYS = "always"
RULE = ("operation", "class", "when", "why")
MODULE = ("path", "precision", "why", "origin")


def run(args: argparse.Namespace) -> Told:
    """Return the rules for one operation, or all of them."""
    policy = Policy.parse(args.policy)
    lists = policy.op_list(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    told: Row = {"lists": lists.name, "dtype": lists.dtype, "device": lists.device, "policy": str(policy)}
    head = f"# {lists.name} ({lists.dtype} on {lists.device}), policy {policy}"
    if args.op:
        told |= _of_one(args.op, lists)
        lines = [line for rule in told["rules"] for line in rule_lines(rule)]
        return Told(told, [head, *(lines or [f"{told['operation']}: {told['note']}"])])
    told["rules"] = [rule_row(rule) for rule in sorted(lists, key=lambda rule: rule.op)]
    told["modules"] = [{name: getattr(module, name) for name in MODULE} for module in lists.modules]
    tables = ((columns, rows) for columns, rows in ((RULE, told["rules"]), (MODULE, told["modules"])) if rows)
    cells = ([columns, *([row[name] for name in columns] for row in rows)] for columns, rows in tables)
    return Told(told, [head, *(line for table in cells for line in aligned(table))])


def _of_one(name: str, lists: OpList) -> Row:
    """Return the rules of an operation, or a note where no list names it. Raises AmpGraphError for an unknown one."""
    op = normalise(name)
    try:
        overloads = check_op_exists(op)
    except ListError as error:
        raise AmpGraphError(f"lists: {error}") from error
    keys = dict.fromkeys(key for overload in overloads for key in lookup_keys(overload))
    rules = [rule for key in keys for rule in lists.rules.get(key, ())]
    note = {} if rules else {"note": _unlisted(op, overloads[0], lists)}
    return {"operation": op, **note, "rules": [rule_row(rule) for rule in rules]}


def _unlisted(op: str, overload: Any, lists: OpList) -> str:
    notes = {
        f"no entry in {lists.name}; runs in the precision of its inputs": lists.unlisted == "native",
        "in no list; it is decomposed into the operations that it calls": node_info.is_composite(overload),
        "in no list; it returns a view, so it is neutral": node_info.is_view(overload),
        f"in no list; it runs exactly as captured (to change that: --policy 'bf16,follow={op}')": True,
    }
    return next(note for note, holds in notes.items() if holds)


def rule_row(rule: Rule) -> Row:
    """Return a rule as plain values."""
    when = " and ".join(f"{name} is {_condition(condition)}" for name, condition in rule.when) or ALWAYS
    return {
        "operation": rule.op, "class": str(rule.cls), "when": when, "why": rule.why,
        "from": rule.origin, "inputs": rule.inputs, "promotes": rule.promotes, "source": rule.source,
    }  # fmt: skip


def _condition(condition: object) -> str:
    if condition is None:
        return "not given"
    if isinstance(condition, tuple):
        return " or ".join(_condition(one) for one in condition)
    return repr(condition)


def rule_lines(row: Row) -> list[str]:
    """Return a rule as lines of text."""
    told = {
        "why": row["why"],
        "from": row["from"],
        "when": row["when"] if row["when"] != ALWAYS else "",
        "inputs": "" if row["inputs"] is None else f"{', '.join(row['inputs'])}; others stay as captured",
        "mixed": "its kernel promotes operands of different dtypes" if row["promotes"] else "",
        "source": row["source"],
    }
    return [f"{row['operation']}: {row['class']}", *(f"  {label:<8}{text}" for label, text in told.items() if text)]


def entry_of(lists: OpList, op: str, origin: str) -> Rule | None:
    """Return the rule for ``op`` at ``origin`` (``common.toml:12``)."""
    here = [rule for rule in lists if rule.origin == origin]
    exact = [r for r in here if op == r.op or r.op.startswith(f"{op}.") or op.startswith(f"{r.op}.")]
    return next(iter([*exact, *here]), None)
