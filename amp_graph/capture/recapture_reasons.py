"""Explains repeated recaptures: which value differs between calls, in the user's names.

Before: ``L['forward'].__self__.calls == 1   # self.calls += 1  # model.py:7 in forward``, a Dynamo guard that fails.
After: "self.calls, which is 61 now (model.py:7, in forward: self.calls += 1)".
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amp_graph.capture.capture_log import break_at
from amp_graph.lists.errors import Attempt

LONGEST = 80  # characters of a value, and of a line, that are shown


@dataclass(frozen=True)
class ChangedValue:
    """The value in which calls differ, as in the last call; ``fix``: how to make them equal."""

    what: str
    value: str
    where: str
    fix: str
    captures: int = 0

    def __str__(self) -> str:
        """Return it as a part of a sentence."""
        now = f", which is {self.value} now" if self.value else ""
        return f"{self.what}{now}{f' ({self.where})' if self.where else ''}"


@dataclass(frozen=True)
class CallSite:
    """A forward's argument names and first line, without a reference to its model.

    Dynamo's compiled code may outlive a model, together with all that its callback references.
    """

    names: tuple[str, ...] = ()
    where: str = ""


def call_site(forward: Callable[..., Any]) -> CallSite:
    """Describe ``forward``."""
    try:
        names = tuple(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # it has no code object
        names = ()
    code = getattr(forward, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code is not None else ""
    return CallSite(names, where)


def changed_value(guards: Sequence[tuple[str, Any]], frame: Any, of: CallSite, captures: int) -> ChangedValue:
    """Return the most frequent cause among failed ``guards``, one per graph, given with their stacks."""
    read = [_read(guard.partition(" #")[0].strip(), frame, of.names) for guard, _ in guards]
    if not read:
        return ChangedValue("a value that no guard names", "", "", "see TORCH_LOGS=recompiles", captures)
    (what, _), *_ = Counter(one.what for one in read).most_common(1)
    i = next(i for i, one in enumerate(read) if one.what == what)
    return replace(read[i], where=break_at("", guards[i][1]).where or of.where, captures=captures)


def _read(guard: str, frame: Any, names: Sequence[str]) -> ChangedValue:
    """Parse one guard: an expression, or a sentence about a tensor."""
    size = re.match(r"tensor '(?P<of>.*)' size mismatch at index (?P<i>\d+)\. expected \d+, actual (?P<n>\d+)", guard)
    if size:
        return ChangedValue(f"{_named(size['of'], names)}.shape[{size['i']}]", size["n"], "", "pad it to a few sizes")
    other = re.match(r"tensor '(?P<of>.*?)' (?P<what>.*?) mismatch\. expected .*, actual (?P<now>.*)", guard)
    if other:
        return ChangedValue(
            f"the {other['what']} of {_named(other['of'], names)}", other["now"], "", "one for all calls"
        )
    return _of_value(guard, frame, names)


def _of_value(guard: str, frame: Any, names: Sequence[str]) -> ChangedValue:
    """Parse a guard on a value: its name, and its value now."""
    equal = re.fullmatch(r"(?P<of>[^=!<>]+) == .+", guard)
    if equal is None:
        return ChangedValue(f"whether {_named(guard, names)}", "", "", "make calls alike")
    what = _named(equal["of"], names)
    few = f"use few values of {what}, or pass it as a tensor if it is only used in arithmetic"
    with Attempt() as tried:
        value = eval(equal["of"], {"L": frame.f_locals, "G": frame.f_globals})
    if tried.error is not None:  # a Dynamo-internal name; the value is optional
        return ChangedValue(what, "", "", few)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and equal["of"].startswith("G["):
        few = f"pass {what} as an argument, or store torch.tensor({value!r}): Python numbers on modules are constants"
    return ChangedValue(what, _short(repr(value)), "", few)


def _named(source: str, names: Sequence[str]) -> str:
    """Return a Dynamo name as the user writes it: ``self.calls``, ``x``."""

    def argument(found: re.Match[str]) -> str:
        place = int(found[1])
        return names[place] if place < len(names) else f"args[{place}]"

    text = re.sub(r"L\['args'\]\[(\d+)\]", argument, source)
    text = re.sub(r"L\['(?:forward|model)'\]\.__self__|L\['model'\]", "self", text)
    text = re.sub(r"[LG](?:\['kwargs'\])?\['([^']+)'\]", r"\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"\b__import_(\w+)\.", lambda found: found[1].replace("_dot_", ".") + ".", text)
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
