"""The collectives of a sharded model or its step: what each unit gathers and reduces, in which dtype, and why.

``Collective("layers.0", "gather", "bf16 and f32", 16960, 2, "4 of 6 parameters low, ...")``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Node
from torch.nn import Module

from amp_graph.capture.low_gathers import unit_of, why_full
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import SHORT, grouped
from amp_graph.passes.graph.meta_keys import SENT
from amp_graph.passes.graph.node_info import is_collective
from amp_graph.passes.sharding.shard_parameters import Sent
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
from amp_graph.step.train_step import TrainStep

ROUNDED = ", embeddings too, whose outputs are f32"
LATER = "not converted, or not called yet"


def collectives_of(model: Module) -> Iterator[Collective]:
    """Yield what the units in ``model`` gather and reduce now; nothing before their first call."""
    for group, records in ((one, found) for one in every_group(model) if (found := records_of(one))):
        dtypes = {name: dtype_of(record) for name, record in records.items()}
        size = sum(gathered_bytes(records[name], dtype) for name, dtype in dtypes.items())
        sent, times = _words(dtypes.values()), 1 + is_resharded(group)
        yield Collective(unit_name(group), "gather", sent, size, times, _reason(group, records))
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
    return LATER if unit is None else _grouped({name: unit.why(name) for name in records}, unit_name(group))


def _grouped(why: dict[str, str], unit: str) -> str:
    """Return why each parameter of a unit is sent as it is; equal reasons once."""
    names = grouped((reason, name.removeprefix(f"{unit}.")) for name, reason in why.items())
    return "; ".join(f"{', '.join(some) if len(some) < len(why) else 'all'}: {one}" for one, some in names.items())


# -- of a step -----------------------------------------------------------------------------------------


def collectives_of_step(step: TrainStep) -> Iterator[Collective]:
    """Yield what the step that was traced last sends; nothing if its model is not sharded."""
    last = next((captured.step for captured in reversed(step.captured) if captured.step is not None), None)
    if last is None:
        return
    graphs = [(last.gm, step.micro_batches), *((update.gm, 1) for update in step.updates[-1:] if not last.update)]
    nodes = [(node, times) for gm, times in graphs for node in gm.graph.nodes if is_collective(node)]
    found = Counter[Collective]()
    for node, times in nodes if any(SENT in node.meta for node, _ in nodes) else ():
        found[_sent(node)] += times
    yield from (replace(one, times=times) for one, times in found.items())


def _sent(node: Node) -> Collective:
    """Return what one collective of a graph sends, in whole."""
    sent: Sent = node.meta.get(SENT, Sent("", "sum", "gradients of what no unit shards"))
    given = value(node.all_input_nodes[0])
    if sent.direction != "gather":
        return Collective(sent.unit, sent.direction, SHORT[given.dtype], given.nbytes, 1, sent.what)
    why = {
        name: f"{SHORT[dtype]}, as all that reads it does so{ROUNDED * looked_up}" if cast else "read as it is"
        for name, dtype, cast, looked_up in sent.parts
    }
    dtypes, reason = _words(dtype for _, dtype, *_ in sent.parts), sent.what + _grouped(why, sent.unit)
    return Collective(sent.unit, "gather", dtypes, value(node).nbytes, 1, reason)
