"""Makes model inputs from one line of text.

``x=f32[8,3,224,224],y=i64[8]:0..999`` becomes ``{"x": randn(8, 3, 224, 224), "y": randint(0, 1000, (8,))}``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import shortened

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}
INTEGERS = ("i64", "i32")
EXAMPLE = '--input "x=f32[8,3,224,224],y=i64[8]:0..999"'
SEED = 0
MOST_ELEMENTS = 1 << 40
MOST_SHOWN = 2000  # the most characters shown of a text with a caret


class SpecError(AmpGraphError):
    """An invalid TARGET or --input; the message points at the place."""


@dataclass(frozen=True)
class InputSpec:
    """One input to make; ``name`` is empty for a positional one, ``low`` and ``high`` bound integers."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    low: int = 0
    high: int = 9

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Return a random tensor: normal, or uniform in ``low..high`` or over booleans."""
        dtype = DTYPES[self.dtype]
        if self.dtype == "bool":
            return torch.randint(0, 2, self.sizes, generator=generator).bool()
        if self.dtype in INTEGERS:
            return torch.randint(self.low, self.high + 1, self.sizes, generator=generator, dtype=dtype)
        return torch.randn(self.sizes, generator=generator).to(dtype)


def make_inputs(
    texts: Sequence[str], device: torch.device | str = "cpu"
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return the positional and the keyword inputs that ``texts`` describe, from a fixed seed."""
    specs = [spec for text in texts for spec in parse_inputs(text)]
    names = [spec.name for spec in specs if spec.name]
    for name, count in Counter(names).items():
        if count > 1:
            raise SpecError(f"--input: {shortened(name)} is given twice\n  legal: each name once\n  example: {EXAMPLE}")
    generator = torch.Generator().manual_seed(SEED)
    made = [(spec.name, _made(spec, generator, device)) for spec in specs]
    return tuple(t for name, t in made if not name), {name: t for name, t in made if name}


def _made(spec: InputSpec, generator: torch.Generator, device: torch.device | str) -> torch.Tensor:
    try:
        return spec.make(generator).to(device)
    except (RuntimeError, MemoryError) as error:
        what = f"{spec.name or 'an input'} of {list(spec.sizes)} cannot be made: {str(error).splitlines()[0][:300]}"
        raise SpecError(f"--input: {what}\n  legal: sizes that fit the memory\n  example: {EXAMPLE}") from error


def parse_inputs(text: str) -> list[InputSpec]:
    """Parse ``x=f32[8,16],i64[8]:0..9``. Raises SpecError, which points at the place."""
    cursor = _Cursor(text)
    specs = [_input(cursor)]
    while not cursor.ended():
        cursor.expect(",", "between two inputs")
        specs.append(_input(cursor))
    return specs


def _input(cursor: _Cursor) -> InputSpec:
    named = cursor.take(r"([A-Za-z_]\w*)\s*=")
    start = cursor.skip_spaces()
    word = cursor.take(r"(\w+)")
    if word not in DTYPES:
        what = f"unknown dtype {shortened(word)}" if word else "a dtype is missing"
        raise cursor.error(what, ", ".join(DTYPES), start)
    cursor.expect("[", "before the sizes; a number is f32[]")
    sizes = _sizes(cursor)
    start = cursor.skip_spaces()
    if not cursor.take(r"(:)"):
        return InputSpec(named, word, sizes)
    if word not in INTEGERS:
        raise cursor.error(f"{word} takes no range", "a range after i64 or i32", start)
    low, high = _range(cursor, torch.iinfo(DTYPES[word]))
    return InputSpec(named, word, sizes, low, high)


def _sizes(cursor: _Cursor) -> tuple[int, ...]:
    sizes: list[int] = []
    if cursor.take(r"(\])"):
        return ()
    while True:
        start = cursor.skip_spaces()
        size = cursor.take(r"(\d+)(?![\w.])")
        if not size:
            raise cursor.error("a size is missing", "whole numbers, as in f32[8,16]", start)
        sizes.append(_whole(size, cursor, start))
        if prod(max(one, 1) for one in sizes) > MOST_ELEMENTS:
            raise cursor.error("so many elements do not fit in memory", f"up to {MOST_ELEMENTS}", start)
        if cursor.take(r"(\])"):
            return tuple(sizes)
        cursor.expect(",", "between sizes, or ']' after them")


def _range(cursor: _Cursor, info: torch.iinfo) -> tuple[int, int]:
    start = cursor.skip_spaces()
    found = cursor.take(r"(-?\d+\s*\.\.\s*-?\d+)(?![\w.])")
    if not found:
        raise cursor.error("a range is missing", "lo..hi, both inclusive, as in i64[8]:0..999", start)
    low, high = (_whole(end, cursor, start) for end in found.split(".."))
    if low > high:
        raise cursor.error(f"the range {low}..{high} is empty", "lo..hi with lo <= hi", start)
    if low < info.min or high >= info.max:
        raise cursor.error(f"the range {low}..{high} does not fit", f"{info.min}..{info.max - 1}", start)
    return low, high


def _whole(digits: str, cursor: _Cursor, start: int) -> int:
    try:
        return int(digits)
    except ValueError:  # thousands of digits
        raise cursor.error("a number of so many digits", "numbers of up to 64 bits", start) from None


class _Cursor:
    """The parser's position in a text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def skip_spaces(self) -> int:
        """Skip spaces and return the position."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.at

    def ended(self) -> bool:
        """Return whether the text is used up."""
        return self.skip_spaces() == len(self.text)

    def take(self, pattern: str) -> str:
        """Consume ``pattern`` and return its group; without a match, return ""."""
        found = re.compile(pattern).match(self.text, self.skip_spaces())
        if found is None:
            return ""
        self.at = found.end()
        return found[1]

    def expect(self, character: str, why: str) -> None:
        """Consume ``character``, or raise."""
        start = self.skip_spaces()
        if not self.take(f"({re.escape(character)})"):
            near = repr(self.text[start]) if start < len(self.text) else "the end"
            raise self.error(f"{near} where {character!r} belongs", f"{character!r} {why}", start)

    def error(self, what: str, legal: str, at: int) -> SpecError:
        """Return an error that points at ``at``."""
        return pointed("--input", what, self.text, at, legal, EXAMPLE)


def pointed(source: str, what: str, text: str, at: int, legal: str, example: str) -> SpecError:
    """Return an error with a caret under character ``at`` of ``text``."""
    if len(text) > MOST_SHOWN:
        begin = max(0, at - MOST_SHOWN // 2)
        text, at = text[begin : begin + MOST_SHOWN], at - begin
    caret = f"    {text}\n    {' ' * at}^"
    return SpecError(f"{source}: {what}\n{caret}\n  legal: {legal}\n  example: {example}")
