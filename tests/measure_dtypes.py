"""Log which operation returned which dtypes, to compare a converted model with autocast, op by op.

    with DtypeLog() as log:
        model(x)
    compare(log, other_log)     # ["3: aten.gelu bfloat16 | float32"]

It looks below autograd (`TorchDispatchMode`), where autocast has already acted.
"""

import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that move or name data: they neither consume a value nor have a precision of their own.
MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "detach alias t view expand transpose permute slice select unsqueeze squeeze _unsafe_view clone "
        "split split_with_sizes unbind as_strided _reshape_alias view_as_real view_as_complex lift_fresh "
        "unfold diagonal chunk empty empty_like new_empty empty_strided new_empty_strided"
    ).split()
)
CASTS = frozenset({"aten._to_copy", "aten.copy_", "aten._foreach_copy_", "prims.convert_element_type"})


def op_name(func: Any) -> str:
    """Name an operator without its overload: `aten.addmm`."""
    return str(func.overloadpacket)


def tensors(obj: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(obj) if isinstance(leaf, torch.Tensor))


class Watch(TorchDispatchMode):
    """A dispatch mode under which Dynamo works: an ordinary one silently runs the original code instead.

    What it does itself is none of Dynamo's business: between the graphs of a broken model it would be captured, too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__torch_dispatch__ = torch._dynamo.disable(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class DtypeLog(Watch):
    """Logs (operation, dtypes of its float outputs) in order, without casts and moves of data."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = op_name(func)
        if name not in MOVES and name not in CASTS:
            dtypes = tuple(t.dtype for t in tensors(out) if t.is_floating_point())
            if dtypes:
                self.entries.append((name, dtypes))
        return out


class HostCopies(Watch):
    """Counts copies of a number to the host: `.item()` is `aten._local_scalar_dense`, a copy elsewhere `_to_copy`."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


PRODUCTS = {"aten.addmm", "aten.mm", "aten.bmm", "aten.linear", "amp_graph.product_low", "aten.convolution"}


def products(model, *args, names=PRODUCTS, **kwargs) -> list[torch.dtype]:
    """Return the dtypes of the matrix products that one call executes, in order; ``names``: of other operations."""
    with DtypeLog() as log:
        model(*args, **kwargs)
    return [dtypes[0] for name, dtypes in log.entries if name in names]


def compare(log_a: DtypeLog, log_b: DtypeLog) -> list[str]:
    """Differences of two logs, aligned by operation name: other dtypes, missing and additional operations."""
    a, b = log_a.entries, log_b.entries
    matcher = difflib.SequenceMatcher(a=[n for n, _ in a], b=[n for n, _ in b], autojunk=False)
    differences = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for k, ((name, left), (_, right)) in enumerate(zip(a[i:i_end], b[j:j_end], strict=True), i):
                if left != right:
                    differences.append(f"{k}: {name} {_dtypes(left)} | {_dtypes(right)}")
            continue
        differences += [f"{k}: {name} {_dtypes(t)} | -" for k, (name, t) in enumerate(a[i:i_end], i)]
        differences += [f"{i}: - | {name} {_dtypes(t)}" for name, t in b[j:j_end]]
    return differences


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return ",".join(str(d).removeprefix("torch.") for d in dtypes)
