"""Finds and loads lists: the default for bfloat16 on CPU is ``bf16_cpu.toml`` over what it extends.

A file is laid over what it extends; of `effective`'s later names, only what the file itself says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from amp_graph.lists.errors import ListError
from amp_graph.lists.fields import did_you_mean
from amp_graph.lists.files import FOLDER, default_name, find, read
from amp_graph.lists.merge import lay_over, merge
from amp_graph.lists.parse import DEVICES, DTYPES, ListFile
from amp_graph.lists.schema import ModuleRule, OpList


def load(name: str, *, dtype: str, device: str) -> OpList:
    """Load ``"default"``, a built-in list (``"autocast_cuda"``), or a TOML file over what it extends."""
    _check_choice("dtype", dtype, DTYPES[:-1])
    _check_choice("device", device, DEVICES[:-1])
    return _build(name, dtype, device, ())


def effective(
    names: Sequence[str],
    *,
    dtype: str,
    device: str,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    fp32_inside: Iterable[str] = (),
    follow: Iterable[str] = (),
    neutral: Iterable[str] = (),
    opaque: Iterable[str] = (),
    remove: Iterable[str] = (),
    modules: Iterable[ModuleRule] = (),
) -> OpList:
    """Load `names`, each over the one before it (none: the default), then apply the arguments of `merge`."""
    if isinstance(names, str):
        raise ListError(f"names={names!r} is a string", where="argument names=", fix=f'names=["{names}"]')
    first, *later = names or ("default",)
    result = load(first, dtype=dtype, device=device)
    for name in later:
        result = _over(result, name)
    return merge(
        result,
        allow=allow,
        deny=deny,
        fp32_inside=fp32_inside,
        follow=follow,
        neutral=neutral,
        opaque=opaque,
        remove=remove,
        modules=modules,
    )


def _build(name: str, dtype: str, device: str, above: tuple[Path, ...]) -> OpList:
    path = find(default_name(dtype, device) if name == "default" else name)
    if path in above:
        chain = " extends ".join(one.name for one in (*above, path))
        raise ListError(f"a circle: {chain}", where=path.name, legal="a chain that ends", fix='extends = "default"')
    file = read(path)
    _check_fits(file, path, dtype, device)
    base = OpList(file.name, dtype, device, "opaque", {})
    for number, parent in enumerate(_parents(file, path)):
        parent_name = _relative(parent, path)
        if number == 0:
            base = _build(parent_name, dtype, device, (*above, path))
        else:
            base = _over(base, parent_name)
    return lay_over(base, file)


def _over(base: OpList, name: str) -> OpList:
    """Lay one file over a list, with what it says itself and not with what it extends."""
    path = find(default_name(base.dtype, base.device) if name == "default" else name)
    file = read(path)
    _check_fits(file, path, base.dtype, base.device)
    return lay_over(base, file)


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
