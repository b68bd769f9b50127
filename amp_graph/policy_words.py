"""The words of a policy's text form: legal values, how a word is read, and the errors for what means nothing.

``field_of("keep_fp32=lm_head", ...)`` is ``{"keep_fp32": "lm_head"}``; ``field_of("bf61", ...)`` raises PolicyError.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_graph.errors import PolicyError
from amp_graph.lists.errors import shortened
from amp_graph.lists.read_toml import LONGEST_NAME

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = tuple(DTYPES.values())
LEVELS = ("O0", "O1", "O2", "O3")
HELD_LOW = ("O2", "O3")  # the levels that hold parameters in low precision
ACCURACIES = ("autocast", "fast")
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def word_of(dtype: torch.dtype) -> str:
    """Return the word for a low precision: "bf16", "fp16"."""
    return next(word for word, known in DTYPES.items() if known == dtype)


def field_of(word: str, text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read one word of a policy's text; ``defaults``: the default of each field."""
    if "=" not in word:
        return _head(word, text, defaults)
    name, value = (part.strip() for part in word.split("=", 1))
    if name not in defaults:
        raise PolicyError(unknown("word", name, set(defaults), text))
    default = defaults[name]
    if isinstance(default, tuple):
        return {name: tuple(filter(None, value.split("|")))}
    if isinstance(default, bool):
        check(name, value, ("true", "false"))
        return {name: value == "true"}
    return {name: ALIASES.get(value, value) if name == "dtype" else value}


def _head(word: str, text: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``bf16``, ``O1`` or ``fp16-O1``."""
    fields: dict[str, Any] = {}
    for part in word.split("-"):
        part = ALIASES.get(part, part)
        if part in (*DTYPES, "auto"):
            fields["dtype"] = part
        elif part in LEVELS:
            fields["level"] = part
        else:
            legal = {*DTYPES, "auto", *LEVELS} | {f"{field}=..." for field in defaults}
            raise PolicyError(unknown("word", part, legal, text))
    return fields


def unknown(what: str, name: str, legal: set[str], text: str = "") -> str:
    """Say that ``name`` is unknown, and what is near it."""
    alias = ALIASES.get(name.removeprefix("torch."))  # a torch.dtype
    known = {w.removesuffix("=...").lower(): w.removesuffix("=...") for w in legal}
    near = difflib.get_close_matches(name[:LONGEST_NAME].lower(), known, 1, 0.5)
    hint = f"did you mean {alias or known[near[0]]!r}?" if alias or near else "policy='bf16,accuracy=fast'"
    where = f" in {shortened(text)}" if text else ""
    return f"policy: unknown {what} {shortened(name)}{where}\n  legal: {', '.join(sorted(legal))}\n  fix:   {hint}"


def accuracy_of(value: Any) -> str | float:
    """Parse an accuracy: a word, a number, or a number's text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            check("accuracy", value, (*ACCURACIES, "a number such as 1.5"))
            return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise PolicyError(
            f"policy: accuracy={shortened(value)} is not an error budget\n"
            "  legal: a number above 0, of which 1 is the predicted error of torch.autocast's plan; autocast; fast\n"
            "  fix:   policy='bf16,accuracy=1.5'"
        )
    return float(value)


def skip_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of ``skip=`` with underscores. Raises PolicyError for an unknown pass or group."""
    if not words:
        return ()
    # This import loads every pass.
    from amp_graph.passes.pipeline_table import GROUPS, is_legal, is_pass, nearest

    found = tuple(word.replace("-", "_") for word in words)
    for word, given in zip(found, words, strict=True):
        if not is_legal(word):
            near = nearest(given[:LONGEST_NAME])
            raise PolicyError(
                f"policy: skip={shortened(given)}: {'this pass is not optional' if is_pass(word) else 'no such pass'}\n"
                f"  legal: an optional pass of docs/internals/passes.md, or a group: {', '.join(sorted(GROUPS))}\n"
                + (f"  fix:   did you mean {' or '.join(map(repr, near))}?" if near else "  fix:   skip=backend")
            )
    return found


def passes_of(words: tuple[str, ...]) -> dict[str, str]:
    """Return the passes that the words of ``skip=`` name, each with its word."""
    if not words:
        return {}
    from amp_graph.passes.pipeline_table import passes_named  # loads every pass

    return passes_named(words)


def word(default: Any, doc: str, *legal: str, takes: str = "", read: Callable[[Any], Any] | None = None) -> Any:
    """Return a field of a policy: its default; what it is for, in Markdown; and what it accepts.

    ``legal``: its values; without any, ``takes`` says what it takes, and ``read`` returns or refuses a value.
    """
    boolean = ("true", "false") if isinstance(default, bool) else ()
    takes = takes or ", ".join(f"`{value}`" for value in legal or boolean)
    return dataclasses.field(default=default, metadata={"doc": doc, "takes": takes, "legal": legal, "read": read})


def stored(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return ``value`` as ``field`` stores it: a list as a tuple, True as "true". Raises PolicyError."""
    name, default, legal, read = field.name, field.default, field.metadata["legal"], field.metadata["read"]
    if legal:
        value = str(value).lower() if isinstance(value, bool) and "true" in legal else value
        check(name, value, legal if default else ("", *legal))
    several = isinstance(default, tuple)
    value = tuple(value) if several and isinstance(value, list) else value
    if several and not (isinstance(value, tuple) and all(isinstance(one, str) for one in value)):
        kind, fix = (
            "names, in a tuple",
            f"Policy({name}=({value!r},))" if isinstance(value, str) else f"Policy({name}=())",
        )
    elif not (several or read or isinstance(value, type(default))):
        kind, fix = "True, False" if isinstance(default, bool) else "a string", f"Policy({name}={default!r})"
    else:
        return read(value) if read else value
    raise PolicyError(
        f"policy: {name}={shortened(value)} is a {type(value).__name__}\n  legal: {kind}\n  fix:   {fix[:300]}"
    )


def path_of(path: Any) -> str:
    """Return the path of a calibration. Raises PolicyError for what cannot be one."""
    if isinstance(path, str) and "\0" not in path:
        return path
    raise PolicyError(
        f"policy: calibration={shortened(path)} is no path\n  legal: a file of amp_graph.calibrate\n"
        "  fix:   policy='fp16,calibration=run.json'"
    )


def check(name: str, value: Any, legal: tuple[str, ...]) -> None:
    """Raise PolicyError if ``value`` of the field ``name`` is not legal."""
    if not isinstance(value, str) or value not in legal:
        raise PolicyError(
            unknown(f"{name} value", value if isinstance(value, str) else shortened(value), {w for w in legal if w})
        )
