"""Reads the fields of a TOML table; refuses a wrong key or type with file and line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.lines import Lines

LONGEST_NAME = 200  # characters; longer names get no suggestion


def check_keys(
    entry: Mapping[str, object], legal: tuple[str, ...], where: Callable[[str], str], inside: str, fix: str
) -> None:
    """Refuse a key that the format does not have."""
    for key in entry:
        if key not in legal:
            near = did_you_mean(key, legal)
            raise ListError(
                f"unknown key {shortened(key)} in {inside}{near}", where=where(key), legal=", ".join(legal), fix=fix
            )


def table(value: object, where: str, fix: str) -> Mapping[str, object]:
    """Return `value` if it is a table."""
    if not isinstance(value, dict):
        raise ListError(f"expected a table, got {shortened(value)}", where=where, legal="a table", fix=fix)
    return value


def tables(value: object, name: str, lines: Lines, fix: str) -> list[Mapping[str, object]]:
    """Return `value` if it is an array of tables."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ListError(f"{name!r} is not an array of tables", where=lines.at(name), legal=f"[[{name}]]", fix=fix)
    return value


def string(entry: Mapping[str, object], key: str, where: str, fix: str, *, default: str) -> str:
    """Return a string field."""
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise ListError(f"{key} = {shortened(value)}", where=where, legal="a string", fix=fix)
    return value


def strings(value: object, key: str, where: str, fix: str) -> tuple[str, ...]:
    """Return a field that is a string or a list of strings."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) and one.strip() for one in values):
        raise ListError(f"{key} = {shortened(value)}", where=where, legal="a name, or a list of names", fix=fix)
    return tuple(values)


def choice(entry: Mapping[str, object], key: str, legal: tuple[str, ...], lines: Lines, default: str) -> str:
    """Return a field of ``[list]`` with an enumerated value."""
    value = entry.get(key, default)
    if value != default and value not in legal:
        near = did_you_mean(str(value), legal)
        raise ListError(
            f"{key} = {shortened(value)}{near}",
            where=lines.at("list", quoted=key),
            legal=", ".join(legal),
            fix=f'[list]\n{key} = "{legal[0]}"',
        )
    return str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean a, b?``, or "" if no known name is similar."""
    near = nearest(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that resemble `name`, the nearest first."""
    if len(name) > LONGEST_NAME:
        return []
    return difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.7)
