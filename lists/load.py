"""Finds and loads lists: the default for bfloat16 on CPU is ``bf16_cpu.toml`` over what it extends.

Built-in files are found by name and trusted at run time (the tests check every entry); a user's file is found by path
and always checked. Each is read once, and laid over what it extends; of `effective`'s later names, only what the file
itself says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from pathlib import Path

import torch

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.merge import lay_over, merge
from amp_graph.lists.operators import check_rules
from amp_graph.lists.parse import DEVICES, DTYPES, ListFile, parse
from amp_graph.lists.read_toml import did_you_mean, read_text
from amp_graph.lists.schema import OpList, Rule

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


def load(name: str, *, dtype: str, device: str) -> OpList:
    """Load ``"default"``, a built-in list (``"autocast_cuda"``), or a TOML file over what it extends."""
    return effective((name,), dtype=dtype, device=device)


def effective(
    names: Sequence[str], *, dtype: str, device: str, accuracy: str | float = "autocast", **changes: Iterable[str]
) -> OpList:
    """Load `names`, each over the one before it (none: the default), then apply ``changes``, arguments of `merge`.

    accuracy: the policy's, by which a default list may say more.
    """
    if isinstance(names, str):
        raise ListError(f"names={names!r} is a string", where="argument names=", fix=f'names=["{names}"]')
    _check_choice("dtype", dtype, DTYPES[:-1])
    _check_choice("device", device, DEVICES[:-1])
    first, *later = names or ("default",)
    files = (*_chain(first, dtype, device, accuracy), *(_one(name, dtype, device) for name in later))
    return merge(_laid(files, dtype, device), **changes)


def _chain(
    name: str, dtype: str, device: str, accuracy: str | float = "autocast", above: tuple[Path, ...] = ()
) -> tuple[ListFile, ...]:
    """Return the files that make a list, each to be laid over those before it.

    Under the default list for accuracy "fast" lies ``fast_cuda``, where the device has such a list.
    """
    path = find(default_name(dtype, device) if name == "default" else name)
    if path in above:
        chain = " extends ".join(one.name for one in (*above, path))
        raise ListError(f"a circle: {chain}", where=path.name, legal="a chain that ends", fix='extends = "default"')
    file = _fitting(path, dtype, device)
    first, *others = _parents(file, path) or (None,)
    below = () if first is None else _chain(_relative(first, path), dtype, device, accuracy, (*above, path))
    extra = f"fast_{device}"
    if accuracy == "fast" and path == FOLDER / f"{default_name(dtype, device)}.toml" and extra in builtin_names():
        others = [*others, extra]
    return (*below, *(_one(_relative(other, path), dtype, device) for other in others), file)


def _one(name: str, dtype: str, device: str) -> ListFile:
    """Return one file: what it says itself and not what it extends."""
    return _fitting(find(default_name(dtype, device) if name == "default" else name), dtype, device)


def _fitting(path: Path, dtype: str, device: str) -> ListFile:
    file = read(path)
    _check_fits(file, path, dtype, device)
    return file


@lru_cache(maxsize=64)
def _laid(files: tuple[ListFile, ...], dtype: str, device: str) -> OpList:
    """Lay files over each other, once: each `convert` asks for them, and they are some 800 entries."""
    return reduce(lay_over, files, OpList(files[0].name, dtype, device, "opaque", {}))


def _parents(file: ListFile, path: Path) -> tuple[str, ...]:
    if file.extends is not None:
        return file.extends
    return () if path.parent == FOLDER else ("default",)


def _relative(name: str, path: Path) -> str:
    """A file name in `extends` is looked for beside the file that says so."""
    return str(path.parent / name) if name.endswith(".toml") else name


def _check_choice(what: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        near = did_you_mean(str(value), legal)
        raise ListError(f"{what}={value!r}{near}", legal=", ".join(legal), fix=f'{what}="{legal[0]}"')


def _check_fits(file: ListFile, path: Path, dtype: str, device: str) -> None:
    for what, said, asked in (("dtype", file.dtype, dtype), ("device", file.device, device)):
        if said not in ("any", asked):
            raise ListError(
                f"this list is for {what} {said!r}, and {asked!r} was asked for",
                where=path.name,
                legal=f"{what} = {asked!r} or 'any'",
                fix=f'[list]\n{what} = "{asked}"',
            )
