"""Finds and loads lists, and lays one over another: built-in < file < argument, the later wins.

The default for bfloat16 on CPU is ``bf16_cpu.toml`` over what it extends. Built-in files are found by name and trusted
at run time (the tests check every entry); a user's file is found by path and always checked. Each is read once, and
laid over what it extends; of `effective`'s later names, only what the file itself says. An unconditional entry replaces
all that earlier lists said of the operator, its overloads and its in-place form; a conditional one is asked before
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from pathlib import Path

import torch

from amp_graph.lists.errors import ListError, shortened
from amp_graph.lists.operators import check_rules
from amp_graph.lists.parse import DEVICES, DTYPES, ListFile, normalise, parse
from amp_graph.lists.read_toml import did_you_mean, read_text
from amp_graph.lists.schema import OpClass, OpList, Rule, general_names

_Rules = dict[str, tuple[Rule, ...]]


def lay_over(base: OpList, file: ListFile) -> OpList:
    """Return `base` with a file's removals, rules and module rules applied."""
    rules = dict(base.rules)
    for op, origin in file.remove:
        _remove(rules, op, origin)
    _add(rules, file.rules)
    return replace(
        base,
        name=file.name,
        unlisted=file.unlisted or base.unlisted,
        rules=rules,
        modules=(*file.modules, *base.modules),
        description=file.description,
    )


def merge(base: OpList, *, remove: Iterable[str] = (), **classes: Iterable[str]) -> OpList:
    """Return `base` with operators put into other classes: ``deny=["gelu", "aten.tanh"]``."""
    for argument, names in (*classes.items(), ("remove", remove)):
        if isinstance(names, str):
            raise ListError(
                f"{argument}={names!r} is a string", where=f"argument {argument}=", fix=f'{argument}=["{names}"]'
            )
    new = [
        Rule(normalise(name), OpClass(cls), f"you asked for it: {cls}={name!r}", origin=f"argument {cls}=")
        for cls, names in classes.items() for name in names
    ]  # fmt: skip
    _check_contradictions(new)
    check_rules(new)
    rules = dict(base.rules)
    for name in remove:
        _remove(rules, normalise(name), "argument remove=")
    _add(rules, new)
    return replace(base, rules=rules)


def _check_contradictions(rules: Sequence[Rule]) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        first = seen.setdefault(rule.op, rule)
        if first.cls is not rule.cls:
            raise ListError(
                f"{rule.op} is asked for twice: {first.cls} and {rule.cls}",
                where=rule.origin,
                legal="one class for an operator",
                fix=f'{rule.cls}=["{rule.op}"]',
            )


def _remove(rules: _Rules, op: str, origin: str) -> None:
    gone = [key for key in rules if op in general_names(key)]
    if not gone:
        raise ListError(
            f"nothing to remove: no entry for {op}{did_you_mean(op, rules)}",
            where=origin,
            legal="an operator that the extended list names",
            fix='[remove]\nops = ["aten.exp"]',
        )
    for key in gone:
        del rules[key]


def _add(rules: _Rules, new: Sequence[Rule]) -> None:
    """Group by operator first: the entries of one list are laid over the earlier lists together."""
    if not new:
        return
    groups: _Rules = {}
    for rule in new:
        groups[rule.op] = (*groups.get(rule.op, ()), rule)
    covered: dict[str, list[str]] = {}
    for key in rules:
        for general in general_names(key):
            covered.setdefault(general, []).append(key)
    for op, group in groups.items():
        is_whole = any(not rule.when for rule in group)
        for key in covered.get(op, ()):
            if key != op and key in groups:
                continue  # a list's own overload and in-place entries stand beside its packet entry
            if is_whole:
                rules.pop(key, None)
            elif key != op and key in rules:
                rules[key] = _ordered((*group, *rules[key]))
        rules[op] = _ordered((*group, *rules.get(op, ())))


def _ordered(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Put conditional rules first, and drop a later repetition of one condition."""
    first: dict[object, Rule] = {}
    for rule in rules:
        first.setdefault(rule.when, rule)
    return tuple(sorted(first.values(), key=lambda rule: not rule.when))


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
    here = _version(torch.__version__)
    since = (rule for rule in file.rules if _version(rule.since or "0.0") <= here)
    file = replace(file, rules=tuple(rule for rule in since if not rule.until or here <= _version(rule.until)))
    if not is_ours:
        check_rules(file.rules)
    return file


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
    default = () if path.parent == FOLDER else ("default",)
    first, *others = (default if file.extends is None else file.extends) or (None,)
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
    for what, said, asked in (("dtype", file.dtype, dtype), ("device", file.device, device)):
        if said not in ("any", asked):
            raise ListError(
                f"this list is for {what} {said!r}, and {asked!r} was asked for",
                where=path.name,
                legal=f"{what} = {asked!r} or 'any'",
                fix=f'[list]\n{what} = "{asked}"',
            )
    return file


@lru_cache(maxsize=64)
def _laid(files: tuple[ListFile, ...], dtype: str, device: str) -> OpList:
    """Lay files over each other, once: each `convert` asks for them, and they are some 800 entries."""
    return reduce(lay_over, files, OpList(files[0].name, dtype, device, "opaque", {}))


def _relative(name: str, path: Path) -> str:
    """A file name in `extends` is looked for beside the file that says so."""
    return str(path.parent / name) if name.endswith(".toml") else name


def _check_choice(what: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ListError(
            f"{what}={value!r}{did_you_mean(str(value), legal)}", legal=", ".join(legal), fix=f'{what}="{legal[0]}"'
        )
