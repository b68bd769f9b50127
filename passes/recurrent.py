"""Recurrent layers in a graph that holds its own backward.

Before: ``aten::mkldnn_rnn_layer`` without autograd makes no workspace, and the backward beside it has nothing to read.
After: ``amp_graph::mkldnn_rnn_layer`` makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.operators import OPS, define_operator

PLAIN = torch.ops.aten.mkldnn_rnn_layer.default


def make_workspaces(gm: GraphModule) -> None:
    """Let the recurrent layers of a traced step, which runs without autograd, make what their backward reads."""
    for node in gm.graph.find_nodes(op="call_function", target=PLAIN):
        node.target = OPS.mkldnn_rnn_layer.default


def _rnn_layer(*given: Any) -> Any:
    """Run the layer as where gradients are recorded, which is what the kernel makes its workspace for."""
    with torch.enable_grad():
        return PLAIN(*(g.detach() if isinstance(g, Tensor) else g for g in given))


define_operator(str(PLAIN._schema).removeprefix("aten::"), _rnn_layer, lambda *given: PLAIN(*given))
