"""The collectives of a sharded model: what each unit of ``fully_shard`` gathers and reduces, in which dtype, and why.

``Collective("layers.0", "gather", "bf16 and f32", 16960, 2, "4 of 6 parameters low, ...")``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from amp_graph.capture.low_gathers import unit_of, why_full
from amp_graph.passes.graph.graph_text import SHORT
from amp_graph.passes.torch_compat.fully_sharded import (
    dtype_of,
    every_group,
    gathered_bytes,
    is_resharded,
    records_of,
    reduced_dtype,
    unit_name,
)
from amp_graph.report.records import Collective

LATER = "not converted, or not called yet"


def collectives_of(model: Module) -> Iterator[Collective]:
    """Yield what the units in ``model`` gather and reduce now; nothing before their first call."""
    for group in every_group(model):
        records = records_of(group)
        if not records:
            continue
        dtypes = {name: dtype_of(record) for name, record in records.items()}
        size = sum(gathered_bytes(records[name], dtype) for name, dtype in dtypes.items())
        times = 1 + is_resharded(group)
        yield Collective(unit_name(group), "gather", _words(dtypes.values()), size, times, _reason(group, records))
        trained = {name: record for name, record in records.items() if record.sharded_param.requires_grad}
        if trained:
            dtype = reduced_dtype(group)
            size = sum(gathered_bytes(record, dtype) for record in trained.values())
            asked = "as its MixedPrecisionPolicy says" if group.mp_policy.reduce_dtype else "as they are summed"
            yield Collective(unit_name(group), "reduce", SHORT[dtype], size, 1, f"gradients {asked}")


def _words(dtypes: Any) -> str:
    return " and ".join(dict.fromkeys(SHORT[dtype] for dtype in sorted(dtypes, key=lambda one: one.itemsize)))


def _reason(group: Any, records: dict[str, Any]) -> str:
    """Return why each parameter of a group is gathered in its dtype."""
    if why := why_full(group):
        return why
    unit = unit_of(group)
    if unit is None:
        return LATER
    names: dict[str, list[str]] = {}
    for name in records:
        names.setdefault(unit.why(name), []).append(name.removeprefix(f"{unit_name(group)}."))
    return "; ".join(f"{', '.join(some) if len(some) < len(records) else 'all'}: {why}" for why, some in names.items())
