"""Graph networks written with scatter and index_add, point clouds, recommenders, metric learning."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import Inputs, add, args, normal
from .losses import binary, classify, full, project

NODES, EDGES = 30, 120


def _graph() -> Inputs:
    edges = torch.randint(0, NODES, (2, EDGES))
    loops = torch.arange(NODES).expand(2, -1)
    return args(torch.randn(NODES, 12), torch.cat([edges, loops], 1))


@layers(lambda cin, cout: dict(lin=nn.Linear(cin, cout, bias=False), bias=nn.Parameter(torch.zeros(cout))))
def GCNLayer(self, x, edge_index):
    src, dst = edge_index
    x = self.lin(x)
    degree = torch.zeros(x.size(0), dtype=x.dtype, device=x.device).index_add(
        0, dst, torch.ones(dst.numel(), dtype=x.dtype, device=x.device)
    )
    norm = degree.rsqrt()
    message = x[src] * (norm[src] * norm[dst]).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, dst, message) + self.bias


@add("gcn", _graph, classify, "graph", "scatter", "kinks")
@layers(lambda: dict(conv1=GCNLayer(12, 16), conv2=GCNLayer(16, 4)))
def GCN(self, x, edge_index):
    return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


@layers(
    lambda cin, cout, heads=2: dict(
        heads=heads,
        cout=cout,
        lin=nn.Linear(cin, heads * cout, bias=False),
        att_src=nn.Parameter(torch.randn(heads, cout) * 0.4),
        att_dst=nn.Parameter(torch.randn(heads, cout) * 0.4),
    )
)
def GATLayer(self, x, edge_index):
    """Softmax over the edges of each node: shift by the maximum, exp, sum, divide."""
    src, dst = edge_index
    n = x.size(0)
    x = self.lin(x).view(n, self.heads, self.cout)
    alpha = (x * self.att_src).sum(-1)[src] + (x * self.att_dst).sum(-1)[dst]
    alpha = F.leaky_relu(alpha, 0.2)
    index = dst.unsqueeze(-1).expand_as(alpha)
    top = torch.full((n, self.heads), float("-inf"), dtype=alpha.dtype, device=alpha.device)
    top = top.scatter_reduce(0, index, alpha.detach(), "amax")
    alpha = torch.exp(alpha - top[dst])
    total = torch.zeros(n, self.heads, dtype=alpha.dtype, device=alpha.device).scatter_add_(0, index, alpha)
    alpha = alpha / (total[dst] + 1e-16)
    message = (x[src] * alpha.unsqueeze(-1)).flatten(1)
    out = torch.zeros(n, self.heads * self.cout, dtype=message.dtype, device=message.device)
    return out.scatter_add(0, dst.unsqueeze(-1).expand_as(message), message)


@add("gat", _graph, classify, "graph", "scatter", "inplace")
@layers(lambda: dict(conv1=GATLayer(12, 8), conv2=GATLayer(16, 2)))
def GAT(self, x, edge_index):
    return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


@add("pointnet", normal((6, 40, 3)), classify, "points", "kinks")
@layers(
    lambda: dict(
        conv1=nn.Conv1d(3, 16, 1),
        conv2=nn.Conv1d(16, 32, 1),
        bn1=nn.BatchNorm1d(16),
        bn2=nn.BatchNorm1d(32),
        fc=nn.Linear(32, 5),
    )
)
def PointNet(self, points):
    x = F.relu(self.bn1(self.conv1(points.transpose(1, 2))))
    x = self.bn2(self.conv2(x))
    return self.fc(torch.max(x, 2, keepdim=False)[0])


def _clicks() -> Inputs:
    batch, hot = 8, 3
    sparse = [torch.randint(0, n, (batch * hot,)) for n in (20, 30, 10)]
    return args(torch.randn(batch, 6), sparse, torch.arange(0, batch * hot, hot))


@add("dlrm", _clicks, binary, "recsys", "embedding_bag", "kinks")
@layers(
    lambda width=8, tables=(20, 30, 10): dict(
        bottom=nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU()),
        bags=nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in tables),
        top=nn.Sequential(
            nn.Linear(width + (len(tables) + 1) * len(tables) // 2, 16), nn.ReLU(), nn.Linear(16, 1)
        ),  # of the dense vector, and a product of each pair
    )
)
def DLRM(self, dense, sparse, offsets):
    x = self.bottom(dense)
    vectors = [x] + [bag(ids, offsets) for bag, ids in zip(self.bags, sparse, strict=True)]
    stacked = torch.stack(vectors, dim=1)
    products = torch.bmm(stacked, stacked.transpose(1, 2))
    i, j = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=x.device)
    return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(-1)


def _squared(out: torch.Tensor) -> torch.Tensor:
    out = full(out)
    wanted = torch.arange(len(out), device=out.device, dtype=out.dtype) % 2
    return (out - wanted).square().mean()


@add(
    "wide_and_deep", lambda: args(torch.randint(0, 15, (16,)), torch.randint(0, 25, (16,))), _squared, "recsys", "kinks"
)
@layers(
    lambda users=15, items=25, width=8: dict(
        wide=nn.Embedding(users * items, 1),
        user=nn.Embedding(users, width),
        item=nn.Embedding(items, width),
        deep=nn.Sequential(nn.Linear(2 * width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)),
        items=items,
    )
)
def WideAndDeep(self, user, item):
    deep = self.deep(torch.cat([self.user(user), self.item(item)], -1))
    wide = self.wide(user * self.items + item)
    return torch.sigmoid(deep + wide).squeeze(-1)


def _triplets() -> Inputs:
    anchor = torch.randn(6, 10)
    return args(anchor, anchor + 0.3 * torch.randn(6, 10), torch.randn(6, 10))


@add("metric_learning", _triplets, lambda out: full(out[0]), "norms", "loss_inside")
@layers(
    lambda: dict(
        net=nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 8)), logit_scale=nn.Parameter(torch.tensor(1.5))
    )
)
def MetricNet(self, anchor, positive, negative):
    """Triplet margin and a temperature over normalised embeddings, both inside."""
    a, p, n = (F.normalize(self.net(x), dim=-1) for x in (anchor, positive, negative))
    triplet = F.triplet_margin_loss(a, p, n, margin=1.0)
    logits = self.logit_scale.exp() * a @ p.t()
    target = torch.arange(len(a), device=a.device)
    return triplet + F.cross_entropy(logits, target), logits


@add("two_tower", lambda: args(torch.randint(0, 40, (5, 4)), torch.randn(7, 9)), project, "recsys", "norms")
@layers(lambda: dict(query=nn.EmbeddingBag(40, 12, mode="mean"), item=nn.Linear(9, 12)))
def TwoTower(self, ids, features):
    """Embeddings with padding and max-norm free lookup, compared by cosine."""
    return F.cosine_similarity(self.query(ids)[:, None], self.item(features)[None], dim=-1) * 5
