"""Makes model inputs from one line of text.

``x=f32[8,3,224,224],y=i64[8]:0..999`` becomes ``{"x": randn(8, 3, 224, 224), "y": randint(0, 1000, (8,))}``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from amp_graph.errors import AmpGraphError

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
LEGAL = f"NAME=DTYPE[SIZES]:LOW..HIGH, where NAME= and the range may be missing; dtypes {', '.join(DTYPES)}"
SEED = 0
MOST_SHOWN = 2000  # the most characters shown of a text with a caret
SPEC = re.compile(
    rf"\s*(?:([A-Za-z_]\w*)\s*=)?\s*({'|'.join(DTYPES)})\s*\[([0-9\s,]*)\]"
    r"\s*(?::\s*(-?[0-9]+)\s*\.\.\s*(-?[0-9]+))?\s*(?:,(?=.)|$)",
    re.DOTALL,
)


def make_inputs(
    texts: Sequence[str], device: torch.device | str = "cpu"
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return the positional and the keyword inputs that ``texts`` describe, from a fixed seed. Raises AmpGraphError."""
    generator = torch.Generator().manual_seed(SEED)
    args: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        for name, dtype, sizes, low, high in parse_inputs(text):
            try:
                is_whole = dtype in (*INTEGERS, "bool")
                draw = partial(torch.randint, low, high + 1) if is_whole else torch.randn
                made = draw(sizes, generator=generator).to(device, DTYPES[dtype])
            except (RuntimeError, MemoryError, TypeError, ValueError, OverflowError) as error:
                what = f"{list(sizes)} cannot be made: {str(error).splitlines()[0][:300]}"
                raise pointed("--input", what[:600], text, 0, LEGAL, EXAMPLE) from error
            if name in kwargs:
                raise pointed("--input", f"{name!r} is given twice", text, 0, LEGAL, EXAMPLE)
            args += [] if name else [made]
            kwargs |= {name: made} if name else {}
    return tuple(args), kwargs


def parse_inputs(text: str) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Parse ``x=f32[8,16],i64[8]:0..9``: the name, "" for a positional input, dtype, sizes, and the ends of integers.

    Raises AmpGraphError, which points at the input that cannot be read.
    """
    specs: list[tuple[str, str, tuple[int, ...], int, int]] = []
    at = 0
    while at < len(text) or not specs:
        found = SPEC.match(text, at)
        if found is None:
            raise pointed("--input", "no input can be read here", text, at, LEGAL, EXAMPLE)
        try:
            sizes = tuple(map(int, found[3].split(","))) if found[3].strip() else ()
            low, high = (0, 1) if found[2] == "bool" else (int(found[4] or 0), int(found[5] or 9))
        except ValueError as error:  # thousands of digits, or a comma too many or too few
            raise pointed("--input", str(error)[:300], text, at, LEGAL, EXAMPLE) from error
        if found[4] and (found[2] not in INTEGERS or low > high):
            raise pointed("--input", f"{found[2]} takes no range {low}..{high}", text, at, LEGAL, EXAMPLE)
        specs.append((found[1] or "", found[2], sizes, low, high))
        at = found.end()
    return specs


def pointed(source: str, what: str, text: str, at: int, legal: str, example: str) -> AmpGraphError:
    """Return an error with a caret under character ``at`` of ``text``."""
    if len(text) > MOST_SHOWN:
        begin = max(0, at - MOST_SHOWN // 2)
        text, at = text[begin : begin + MOST_SHOWN], at - begin
    return AmpGraphError(f"{source}: {what}\n    {text}\n    {' ' * at}^\n  legal: {legal}\n  example: {example}")
