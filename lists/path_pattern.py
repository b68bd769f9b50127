r"""Match module paths against regular expressions in bounded time: all places at once, without going back.

Python's ``re`` tries one way after another: ``(a+)+b`` takes a day over 60 times "a". Here a part of a pattern takes
the set of places where it may begin (the bits of a number) to the set of those where it may end.
Before: ``re.fullmatch(pattern, path)``. After: ``matches(pattern, path)``, the same answer, or a PatternError.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from amp_graph.lists.errors import ListError

if sys.version_info >= (3, 11):
    from re import _constants as c  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as c
    import sre_parse as parser

LONGEST = 2000  # characters of a pattern
DEEPEST = 40  # groups in groups
STEPS = 100_000  # of one match: some 0.1 s
LEGAL = f"a Python regular expression for the whole module path, of up to {LONGEST} characters"
_PLACES = {
    c.AT_BEGINNING: "^", c.AT_BEGINNING_STRING: r"\A", c.AT_BOUNDARY: r"\b", c.AT_NON_BOUNDARY: r"\B",
    c.AT_END: "$", c.AT_END_STRING: r"\Z",
}  # fmt: skip
_KINDS = {
    c.CATEGORY_DIGIT: r"\d", c.CATEGORY_NOT_DIGIT: r"\D", c.CATEGORY_SPACE: r"\s", c.CATEGORY_NOT_SPACE: r"\S",
    c.CATEGORY_WORD: r"\w", c.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_Part = Callable[["_Walk", int], int]


class PatternError(ListError):
    """What is no regular expression, or one whose time has no bound."""

    def __init__(self, what: str) -> None:
        super().__init__(f"regular expression: {what}", legal=LEGAL, fix='"lm_head|.*norm"')
        self.what = what


@lru_cache(maxsize=256)
def check_pattern(pattern: str) -> None:
    """Raise PatternError unless ``pattern`` can be matched."""
    _part(pattern)


@lru_cache(maxsize=1 << 16)
def matches(pattern: str, path: str) -> bool:
    """Say whether ``pattern`` matches the whole of ``path``. Raises PatternError."""
    return bool(_part(pattern)(_Walk(path), 1) >> len(path))


class _Walk:
    """One text, and how many steps were taken over it."""

    def __init__(self, text: str) -> None:
        self.text, self.steps, self.known = text, 0, dict[Any, int]()

    def step(self) -> None:
        self.steps += 1
        if self.steps > STEPS:
            raise PatternError("it takes too long to match")

    def places(self, key: object, holds: Callable[[int], object], count: int) -> int:
        """Return the places below ``count`` where ``holds``, which is asked once."""
        if key not in self.known:
            self.known[key] = sum(1 << at for at in range(count) if holds(at))
        return self.known[key]


@lru_cache(maxsize=256)
def _part(pattern: str) -> _Part:
    if not isinstance(pattern, str):
        raise PatternError(f"it is a {type(pattern).__name__}")
    if len(pattern) > LONGEST:
        raise PatternError(f"it has {len(pattern)} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what later versions of Python may read otherwise
            re.compile(pattern)
            parsed = parser.parse(pattern)
        return _sequence(list(parsed), parsed.state.flags, 0)
    except (re.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
        raise PatternError(str(error)) from error


def _sequence(items: list[Any], flags: int, depth: int) -> _Part:
    if depth > DEEPEST:
        raise PatternError(f"it has more than {DEEPEST} groups in groups")
    parts = [_item(op, given, flags, depth + 1) for op, given in items]

    def ends(walk: _Walk, begins: int) -> int:
        for part in parts:
            walk.step()
            begins = part(walk, begins) if begins else 0
        return begins

    return ends


def _item(op: Any, given: Any, flags: int, depth: int) -> _Part:
    """Return what one item of a parsed pattern does."""
    if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
        return _character(_set_text([(op, given)] if op in (c.LITERAL, c.NOT_LITERAL) else given, op), flags)
    if op is c.AT:
        return _place(_PLACES[given], flags)
    if op is c.SUBPATTERN:
        _, added, removed, inner = given
        return _sequence(list(inner), (flags | added) & ~removed, depth)
    if op is c.BRANCH:
        return _branch([_sequence(list(one), flags, depth) for one in given[1]])
    if op in (c.MAX_REPEAT, c.MIN_REPEAT):  # which of them decides how much groups take, not whether all matches
        least, most, inner = given
        return _repeat(_sequence(list(inner), flags, depth), least, most)
    if op in (c.ASSERT, c.ASSERT_NOT):
        direction, inner = given
        back = inner.getwidth()[0] if direction < 0 else 0
        return _look(_sequence(list(inner), flags, depth), direction < 0, back, op is c.ASSERT)
    raise PatternError(f"{str(op).lower().replace('_', ' ')}: what a group took cannot be asked for again")


def _set_text(items: Any, op: Any) -> str:
    """Return the text of a pattern for one character."""
    if op is c.ANY:
        return "."
    shown = ""
    for kind, given in items:
        if kind is c.NEGATE:
            shown = "^" + shown
        elif kind is c.NOT_LITERAL:
            shown = f"^\\U{given:08x}"
        elif kind is c.LITERAL:
            shown += f"\\U{given:08x}"
        elif kind is c.RANGE:
            shown += f"\\U{given[0]:08x}-\\U{given[1]:08x}"
        else:
            shown += _KINDS[given]
    return f"[{shown}]"


def _character(text: str, flags: int) -> _Part:
    one = re.compile(text, flags & (re.ASCII | re.IGNORECASE | re.DOTALL))
    is_one = lru_cache(maxsize=256)(lambda character: one.fullmatch(character) is not None)

    def ends(walk: _Walk, begins: int) -> int:
        return (begins & walk.places(one, lambda at: is_one(walk.text[at]), len(walk.text))) << 1

    return ends


def _place(text: str, flags: int) -> _Part:
    empty = re.compile(text, flags & (re.ASCII | re.MULTILINE))
    return lambda walk, begins: begins & walk.places(empty, lambda at: empty.match(walk.text, at), len(walk.text) + 1)


def _branch(ways: list[_Part]) -> _Part:
    def ends(walk: _Walk, begins: int) -> int:
        found = 0
        for way in ways:
            found |= way(walk, begins)
        return found

    return ends


def _repeat(inner: _Part, least: int, most: int) -> _Part:
    """Go on while there are new places; beyond as many turns as the text has places, one more changes nothing."""

    def ends(walk: _Walk, begins: int) -> int:
        key = (ends, begins)
        if key not in walk.known:
            walk.known[key] = reached(walk, begins)
        return walk.known[key]

    def reached(walk: _Walk, begins: int) -> int:
        turns = len(walk.text) + 2
        for _ in range(min(least, turns)):
            walk.step()
            begins = inner(walk, begins) if begins else 0
        found = new = begins
        for _ in range(min(most, least + turns) - least):
            walk.step()
            new = inner(walk, new) & ~found if new else 0
            if not new:
                break
            found |= new
        return found

    return ends


def _look(inner: _Part, behind: bool, back: int, wanted: bool) -> _Part:
    def holds(walk: _Walk, at: int) -> bool:
        walk.step()
        begin = at - back
        found = inner(walk, 1 << begin) if begin >= 0 else 0
        return bool(found >> at & 1 if behind else found) is wanted

    def ends(walk: _Walk, begins: int) -> int:
        return begins & walk.places(inner, lambda at: holds(walk, at), len(walk.text) + 1)

    return ends
