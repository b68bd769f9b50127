"""torch_geometric's networks, as its examples stack them, on random graphs whose size differs from batch to batch."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.layers import layers
from tests.zoo.model import Batch, Table, args

TABLE = Table()
WIDTH = 16


def _model(name: str, **how: Any) -> nn.Module:
    from torch_geometric.nn import models

    return getattr(models, name)(WIDTH, 32, num_layers=2, out_channels=8, **how)


def _two(name: str, **how: Any) -> dict[str, nn.Module]:
    import torch_geometric.nn

    kind = getattr(torch_geometric.nn, name)
    return dict(first=kind(WIDTH, 32, **how), second=kind(32, 8, **how))


@layers(_two)
def Stack(self: nn.Module, x: torch.Tensor, edge_index: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Two of one convolution of torch_geometric, as its examples write a network: [nodes, 8]."""
    return self.second(self.first(x, edge_index, *rest).relu(), edge_index, *rest)


def _graph(size: int, weights: int = 0) -> Batch:
    nodes = 10 * size
    rest = (torch.rand(4 * nodes, weights) if weights > 1 else torch.rand(4 * nodes),) if weights else ()
    return args(torch.randn(nodes, WIDTH), torch.randint(0, nodes, (2, 4 * nodes)), *rest)


def _relations(size: int) -> Batch:
    (x, edges), _ = _graph(size)
    return args(x, edges, torch.randint(0, 3, edges.shape[1:]))


for _name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
    TABLE.add("torch_geometric", f"torch_geometric/{_name}", partial(_model, _name), _graph)
TABLE.add("torch_geometric", "torch_geometric/GATv2", partial(_model, "GAT", v2=True), _graph)
for _name, _how in (
    ("TransformerConv", {}), ("ChebConv", {"K": 2}), ("GraphConv", {}), ("TAGConv", {}), ("SGConv", {}),
    ("ARMAConv", {}),
    ("LEConv", {}), ("ClusterGCNConv", {}), ("FeaStConv", {}), ("GENConv", {}), ("ResGatedGraphConv", {}),
):  # fmt: skip
    TABLE.add("torch_geometric", f"torch_geometric/{_name}", partial(Stack, _name, **_how), _graph)
TABLE.add("torch_geometric", "torch_geometric/RGCNConv", partial(Stack, "RGCNConv", num_relations=3), _relations)
TABLE.add("torch_geometric", "torch_geometric/FiLMConv", partial(Stack, "FiLMConv"), _graph)
TABLE.add(
    "torch_geometric",
    "torch_geometric/GMMConv",
    partial(Stack, "GMMConv", dim=2, kernel_size=3),
    partial(_graph, weights=2),
)
