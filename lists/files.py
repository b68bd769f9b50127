"""Finds list files, and reads each once: built-in ones by name, a user's by path.

Built-in files are trusted at run time (the tests check every entry); a user's file is always checked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.fields import did_you_mean
from amp_graph.lists.operators import check_rules
from amp_graph.lists.parse import ListFile, parse
from amp_graph.lists.read_toml import read_text
from amp_graph.lists.schema import Rule

FOLDER = Path(__file__).parent
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def builtin_names() -> tuple[str, ...]:
    """Return the names of the lists that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def default_name(dtype: str, device: str) -> str:
    """``bf16_cpu`` for bfloat16 on CPU."""
    return f"{_SHORT[dtype]}_{device}"


def find(name: str) -> Path:
    """Return the file of a built-in list, or the one at a path."""
    try:
        path = Path(name).expanduser().resolve() if name.endswith(".toml") else FOLDER / f"{name}.toml"
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, an unknown user's home, a symlink loop
        is_file = False
    if not is_file:
        known = ("default", *builtin_names())
        raise ListError(
            f"no list {shortened(name)}{did_you_mean(name, known)}",
            legal=f"{', '.join(known)}, or the path of a .toml file",
            fix='lists = "default"',
        )
    return path


def read(path: Path) -> ListFile:
    """Return the parsed file, from memory unless it has changed."""
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except OSError as error:  # deleted since it was found
        raise ListError(str(error), where=str(path), fix='lists = "default"') from error


@lru_cache(maxsize=64)
def _parsed(path: Path, mtime: int) -> ListFile:
    is_ours = path.parent == FOLDER
    file = parse(read_text(path, 'lists = "default"'), path.name if is_ours else str(path))
    file = replace(file, rules=tuple(rule for rule in file.rules if _is_current(rule)))
    if not is_ours:
        check_rules(file.rules)
    return file


def _is_current(rule: Rule) -> bool:
    here = _version(torch.__version__)
    return _version(rule.since or "0.0") <= here and (not rule.until or here <= _version(rule.until))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
