"""Finds and loads lists: the default for bfloat16 on CPU is ``bf16_cpu.toml`` over what it extends.

A file is laid over what it extends; of `effective`'s later names, only what the file itself says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from pathlib import Path

from amp_graph.lists.errors import ListError
from amp_graph.lists.fields import did_you_mean
from amp_graph.lists.files import FOLDER, builtin_names, default_name, find, read
from amp_graph.lists.merge import lay_over, merge
from amp_graph.lists.parse import DEVICES, DTYPES, ListFile
from amp_graph.lists.schema import ModuleRule, OpList


def load(name: str, *, dtype: str, device: str) -> OpList:
    """Load ``"default"``, a built-in list (``"autocast_cuda"``), or a TOML file over what it extends."""
    _check_dtype_and_device(dtype, device)
    return _laid(_chain(name, dtype, device), dtype, device)


def effective(
    names: Sequence[str],
    *,
    dtype: str,
    device: str,
    accuracy: str | float = "autocast",
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    fp32_inside: Iterable[str] = (),
    follow: Iterable[str] = (),
    neutral: Iterable[str] = (),
    opaque: Iterable[str] = (),
    remove: Iterable[str] = (),
    modules: Iterable[ModuleRule] = (),
) -> OpList:
    """Load `names`, each over the one before it (none: the default), then apply the arguments of `merge`.

    accuracy: the policy's, by which a default list may say more.
    """
    if isinstance(names, str):
        raise ListError(f"names={names!r} is a string", where="argument names=", fix=f'names=["{names}"]')
    _check_dtype_and_device(dtype, device)
    first, *later = names or ("default",)
    files = (*_chain(first, dtype, device, accuracy), *(_one(name, dtype, device) for name in later))
    return merge(
        _laid(files, dtype, device),
        allow=allow,
        deny=deny,
        fp32_inside=fp32_inside,
        follow=follow,
        neutral=neutral,
        opaque=opaque,
        remove=remove,
        modules=modules,
    )


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


def _check_dtype_and_device(dtype: str, device: str) -> None:
    _check_choice("dtype", dtype, DTYPES[:-1])
    _check_choice("device", device, DEVICES[:-1])


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
