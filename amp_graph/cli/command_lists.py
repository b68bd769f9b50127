"""``amp-graph lists``: prints the class of an operation, the list that sets it, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from amp_graph.cli.terminal import write_json, write_lines, write_table
from amp_graph.errors import AmpGraphError, ListError
from amp_graph.lists import OpList, Rule, check_op_exists
from amp_graph.lists.operators import known_names
from amp_graph.lists.parse import normalise
from amp_graph.lists.read_toml import nearest
from amp_graph.lists.schema import Kind, lookup_keys
from amp_graph.passes.graph import node_info
from amp_graph.policy import Policy

Row = dict[str, Any]
RULE = ("operation", "class", "when", "why")


def run(args: argparse.Namespace) -> int:
    """Print the rules for one operation, or all of them."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy.parse(args.policy)
    lists = policy.op_list(device)
    told = _as_dict(args.op, lists, policy)
    if args.json:
        write_json(told, sys.stdout)
        return 0
    write_lines([(f"# {lists.name} ({lists.dtype} on {lists.device}), policy {policy}", "bold")], sys.stdout)
    if args.op:
        lines = [line for rule in told["rules"] for line in rule_lines(rule)]
        write_lines([(line, "") for line in lines or [f"{told['operation']}: {told['note']}"]], sys.stdout)
        return 0
    write_table(RULE, [([row[name] for name in RULE], "") for row in told["rules"]], sys.stdout)
    if told["modules"]:
        write_lines([("", "")], sys.stdout)
        rows = [((row["path"], row["precision"], row["why"], row["from"]), "") for row in told["modules"]]
        write_table(("module", "precision", "why", "from"), rows, sys.stdout)
    return 0


def _as_dict(name: str | None, lists: OpList, policy: Policy) -> Row:
    """Return the rules of one operation, or all rules; an operation that no list names has a note and no rules."""
    told: Row = {"lists": lists.name, "dtype": lists.dtype, "device": lists.device, "policy": str(policy)}
    if name:
        op, overload, rules = _rules_of(name, lists)
        note = {} if rules else {"note": _unlisted(op, overload, lists)}
        return {**told, "operation": op, **note, "rules": [rule_row(rule) for rule in rules]}
    rules = sorted(lists, key=lambda rule: rule.op)
    modules = [{"path": m.path, "precision": m.precision, "why": m.why, "from": m.origin} for m in lists.modules]
    return {**told, "rules": [rule_row(rule) for rule in rules], "modules": modules}


def rule_row(rule: Rule) -> Row:
    """Return a rule as plain values."""
    return {
        "operation": rule.op, "class": str(rule.cls), "when": when_text(rule), "why": rule.why,
        "from": rule.origin, "inputs": rule.inputs, "promotes": rule.promotes, "source": rule.source,
    }  # fmt: skip


def _rules_of(name: str, lists: OpList) -> tuple[str, Any, list[Rule]]:
    """Return the operation's full name, its first overload, and its rules. Raises AmpGraphError for an unknown one."""
    op = normalise(name)
    try:
        overloads = check_op_exists(op)
    except ListError as error:
        what, legal = str(error).splitlines()[:2]
        near = next(iter(nearest(op, known_names(op.partition(".")[0]))), "aten.linear")
        raise AmpGraphError(f"lists: {what}\n{legal}\n  fix:   amp-graph lists {near}") from error
    keys = list(dict.fromkeys(key for overload in overloads for key in lookup_keys(overload)))
    return op, overloads[0], [rule for key in keys for rule in lists.rules.get(key, ())]


def _unlisted(op: str, overload: Any, lists: OpList) -> str:
    if lists.unlisted == "native":
        return f"no entry in {lists.name}; runs in the precision of its inputs"
    if node_info.is_composite(overload):
        return "in no list; it is decomposed into the operations that it calls"
    if node_info.is_view(overload):
        return "in no list; it returns a view, so it is neutral"
    return f"in no list; it runs exactly as captured (to change that: --policy 'bf16,follow={op}')"


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


ALWAYS = "always"


def when_text(rule: Rule) -> str:
    """``exponent is 1, 2, 3 or 4`` for a rule's conditions; "always" where it has none."""
    return " and ".join(f"{name} is {_condition(condition)}" for name, condition in rule.when) or ALWAYS


def _condition(condition: object) -> str:
    if isinstance(condition, Kind):
        return "not given" if condition.name == "none" else f"of kind {condition.name}"
    if isinstance(condition, tuple):
        return " or ".join(_condition(one) for one in condition)
    return repr(condition)


def entry_of(lists: OpList, op: str, origin: str) -> Rule | None:
    """Return the rule for ``op`` at ``origin`` (``common.toml:12``)."""
    here = [rule for rule in lists if rule.origin == origin]
    exact = [r for r in here if op == r.op or r.op.startswith(f"{op}.") or op.startswith(f"{r.op}.")]
    return next(iter([*exact, *here]), None)
