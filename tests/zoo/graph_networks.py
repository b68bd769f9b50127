"""torch_geometric's networks, as its examples stack them, on random graphs whose size differs from batch to batch."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.layers import layers
from tests.zoo.model import Batch, Table, args, built

TABLE = Table()
WIDTH = 16


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


WHOLE = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {}, "EdgeCNN": {}, "GATv2": {"v2": True}}
for _name, _how in WHOLE.items():
    _path = f"torch_geometric.nn.models:{_name.removesuffix('v2')}"
    _build = partial(built, _path, WIDTH, 32, num_layers=2, out_channels=8, **_how)
    TABLE.add("torch_geometric", f"torch_geometric/{_name}", _build, _graph)
for _name, _how, _batch in (
    ("TransformerConv", {}, _graph), ("ChebConv", {"K": 2}, _graph), ("GraphConv", {}, _graph), ("TAGConv", {}, _graph),
    ("SGConv", {}, _graph), ("ARMAConv", {}, _graph), ("LEConv", {}, _graph), ("ClusterGCNConv", {}, _graph),
    ("FeaStConv", {}, _graph), ("GENConv", {}, _graph), ("ResGatedGraphConv", {}, _graph),
    ("RGCNConv", {"num_relations": 3}, _relations), ("FiLMConv", {}, _graph),
    ("GMMConv", {"dim": 2, "kernel_size": 3}, partial(_graph, weights=2)),
):  # fmt: skip
    TABLE.add("torch_geometric", f"torch_geometric/{_name}", partial(Stack, _name, **_how), _batch)
