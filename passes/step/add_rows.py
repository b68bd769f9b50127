"""A gradient to which rows are still to be added, and an update by element that does not add them up in a whole table.

Before: ``add_rows(dense, ids, rows)``, fp32, of the size of a table. After: the update of the table by ``dense``, and
that of copies of the rows, which replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from amp_graph.passes.native.operator_library import OPS, define_as_typed

# Takes parameters, gradients, state by kind, the learning rate, and found_inf or None.
Apply = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], Tensor, Tensor | None], None]


def add_rows(dense: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Return ``dense`` in fp32, contiguous, with ``rows`` added to those of the numbers ``ids``."""
    return torch.empty(dense.shape, device=dense.device).copy_(dense).index_add_(0, ids, rows)


define_as_typed(add_rows, lambda dense: dense.new_empty(dense.shape, dtype=torch.float32))
ADD_ROWS = OPS.add_rows.default


def by_rows(apply: Apply, tables: Sequence[int]) -> Callable[..., None]:
    """Return ``apply``, which updates by element, for gradients to which rows are still to be added.

    What it returns takes their ids and the rows last, a pair for each of the parameters numbered ``tables``. Copies of
    the rows of parameter and state are updated by their whole gradients, and written back behind the update of all.
    """

    def update(
        parameters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        rate: Tensor,
        found_inf: Tensor | None,
        added: list[tuple[Tensor, Tensor]],
    ) -> None:
        kinds = [[*grads], [*parameters], *([*kind] for kind in states)]
        copied = []
        for n, (ids, rows) in zip(tables, added, strict=True):
            kinds[0][n] = laid_out_as(parameters[n], grads[n])
            whole = [kind[n] for kind in kinds]
            copies = [t[ids] if t.dim() else t.clone() for t in whole]
            copies[0] = copies[0] + _sums_of_equal(ids, rows, len(parameters[n]))
            for kind, one in zip(kinds, copies, strict=True):
                kind.append(one)
            copied.append((ids, whole[1:], copies[1:]))
        apply(kinds[1], kinds[0], kinds[2:], rate, found_inf)
        for ids, whole, copies in copied:
            for one, new in zip(whole, copies, strict=True):
                if one.dim():
                    one.index_copy_(0, ids, new)

    return update


def _sums_of_equal(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return for each of ``rows`` the sum of those with the same of ``ids``, below ``count``, in their order."""
    place = ids.new_empty(count)
    place[ids] = torch.arange(len(ids), device=ids.device)
    one = place[ids]  # of equal ids one place, whichever was written last
    return torch.zeros_like(rows).index_add_(0, one, rows)[one]
