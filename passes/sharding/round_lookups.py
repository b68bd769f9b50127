"""Let embeddings look up in low precision what is sharded, so that their tables are gathered so.

Before: ``embedding(table, ids)``, for which a table is gathered in fp32. After: ``embedding(table.to(low), ids)``, cast
to fp32 behind it. Backward reads no table: its gradient is summed in fp32, as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.joint_graph import input_nodes
from amp_graph.passes.torch_compat.operators import TO_COPY

EMBEDDING: Any = torch.ops.aten.embedding.default


@dataclass(frozen=True)
class RoundLookups(Pass):
    """Replaces ``embedding(t, ids)`` with ``embedding(t.to(low), ids).to(t.dtype)``, if ``t`` is read low alone then.

    tables: by name of input, the dtype to which it may be rounded.

    Law: what is looked up is rounded once, and no gradient is. Exactness: approximate, half a unit in the last place of
    the low dtype.
    """

    tables: Mapping[str, torch.dtype] = field(default_factory=dict)

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every table."""
        known = input_nodes(gm)
        for name, dtype in self.tables.items():
            lookups = [node for node in known[name].users if node.target is EMBEDDING]
            casts = [node for node in known[name].users if node.target is TO_COPY and value(node).dtype == dtype]
            others = [node for node in known[name].users if node not in (*lookups, *casts)]
            if others:
                yield Skip(name, f"{others[0].name} reads it as it is")
                continue
            for node in lookups:
                rounded = append(gm, look_up, dtype, *node.args, before=node)
                node.replace_all_uses_with(rounded)
                gm.graph.erase_node(node)
                yield Change(self.name, "round", rounded.name, f"looked up in {name}")


def look_up(dtype: torch.dtype, table: Tensor, *given: Any) -> Tensor:
    """Return what is looked up in ``table``, rounded to ``dtype``, in its own dtype."""
    return EMBEDDING(table.to(dtype), *given).to(table.dtype)
