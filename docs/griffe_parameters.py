"""Reads the parameters out of this project's docstrings, for the API reference: an extension of griffe.

Sentences that begin with names of parameters and a colon, ``policy: as for convert. scaler: for fp16.``, are written as
the section ``Args:`` that griffe knows, and become a table with types and defaults.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAME = r"`*[A-Za-z_]\w*`*"
START = re.compile(rf"(?:\A|(?<=\n)|(?<=[.;] ))({NAME}(?:, {NAME})*)(?: \([^)]*\))?: ")
SIGN = re.compile(r"(?:(?<=[.;] )|(?<=\n)|\A)(Raises|Returns) ")
# Classes whose parameters are those of a base.
INHERITED = {
    f"amp_graph.integrations.{package}.AmpGraphPrecision": {"policy", "scaler", "keep_converted"}
    for package in ("lightning", "pytorch_lightning")
}


class Parameters(griffe.Extension):
    """Rewrites docstrings when an object is loaded."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite the docstring of a function."""
        self._rewrite(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Rewrite the docstring of a class: its parameters are those of ``__init__``, or else its fields."""
        made = cls.members.get("__init__")
        fields = {name for name, member in cls.members.items() if member.is_attribute}
        names = {p.name for p in made.parameters} if isinstance(made, griffe.Function) else fields
        self._rewrite(cls, names or INHERITED.get(cls.path, set()))

    def _rewrite(self, found: griffe.Object, names: set[str]) -> None:
        if found.docstring is not None:
            found.docstring.value = sectioned(found.docstring.value, names)


def sectioned(text: str, names: set[str]) -> str:
    """Return ``text`` with what it says of ``names`` in a section ``Args:``, after the rest."""
    prose, entries = [], []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        rest, found = taken_apart(paragraph, names)
        prose += [rest] if rest else []
        entries += found
    shown = SIGN.sub(r"**\1** ", "\n\n".join(prose))
    return "\n".join([shown, "", "Args:", *(f"    {name}: {said}" for name, said in entries)]) if entries else shown


def taken_apart(paragraph: str, names: set[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return what ``paragraph`` says besides parameters, and what it says of each parameter."""
    starts = [start for start in START.finditer(paragraph) if names.issuperset(_names(start))]
    if not starts:
        return paragraph, []
    end = min((sign.start() for sign in SIGN.finditer(paragraph) if sign.start() > starts[-1].end()), default=None)
    ends = [*(start.start() for start in starts[1:]), end]
    entries = [
        (name, " ".join(paragraph[start.end() : until].split()))
        for start, until in zip(starts, ends, strict=True)
        for name in _names(start)
    ]
    return f"{paragraph[: starts[0].start()].strip()} {paragraph[end:] if end else ''}".strip(), entries


def _names(start: re.Match[str]) -> list[str]:
    return [name.strip("`") for name in start[1].split(", ")]
