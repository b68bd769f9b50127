"""Graph networks written with scatter and index_add, point clouds, recommenders, metric learning."""

import torch
import torch.nn.functional as F
from torch import nn

from .core import Inputs, add, args
from .losses import binary, classify, full, project

NODES, EDGES = 30, 120


def _graph() -> Inputs:
    edges = torch.randint(0, NODES, (2, EDGES))
    loops = torch.arange(NODES).expand(2, -1)
    return args(torch.randn(NODES, 12), torch.cat([edges, loops], 1))


class GCNLayer(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout, bias=False)
        self.bias = nn.Parameter(torch.zeros(cout))

    def forward(self, x, edge_index):
        src, dst = edge_index
        x = self.lin(x)
        degree = torch.zeros(x.size(0), dtype=x.dtype, device=x.device).index_add(
            0, dst, torch.ones(dst.numel(), dtype=x.dtype, device=x.device)
        )
        norm = degree.rsqrt()
        message = x[src] * (norm[src] * norm[dst]).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, dst, message) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNLayer(12, 16), GCNLayer(16, 4)

    def forward(self, x, edge_index):
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


add("gcn", GCN, _graph, classify, "graph", "scatter", "kinks")


class GATLayer(nn.Module):
    """Softmax over the edges of each node: shift by the maximum, exp, sum, divide."""

    def __init__(self, cin, cout, heads=2):
        super().__init__()
        self.heads, self.cout = heads, cout
        self.lin = nn.Linear(cin, heads * cout, bias=False)
        self.att_src = nn.Parameter(torch.randn(heads, cout) * 0.4)
        self.att_dst = nn.Parameter(torch.randn(heads, cout) * 0.4)

    def forward(self, x, edge_index):
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


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GATLayer(12, 8), GATLayer(16, 2)

    def forward(self, x, edge_index):
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


add("gat", GAT, _graph, classify, "graph", "scatter", "inplace")


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, 5)

    def forward(self, points):
        x = F.relu(self.bn1(self.conv1(points.transpose(1, 2))))
        x = self.bn2(self.conv2(x))
        return self.fc(torch.max(x, 2, keepdim=False)[0])


add("pointnet", PointNet, lambda: args(torch.randn(6, 40, 3)), classify, "points", "kinks")


class DLRM(nn.Module):
    def __init__(self, width=8, tables=(20, 30, 10)):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in tables)
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse, offsets):
        x = self.bottom(dense)
        vectors = [x] + [bag(ids, offsets) for bag, ids in zip(self.bags, sparse, strict=True)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=x.device)
        return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(-1)


def _clicks() -> Inputs:
    batch, hot = 8, 3
    sparse = [torch.randint(0, n, (batch * hot,)) for n in (20, 30, 10)]
    return args(torch.randn(batch, 6), sparse, torch.arange(0, batch * hot, hot))


add("dlrm", DLRM, _clicks, binary, "recsys", "embedding_bag", "kinks")


class WideAndDeep(nn.Module):
    def __init__(self, users=15, items=25, width=8):
        super().__init__()
        self.wide = nn.Embedding(users * items, 1)
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.deep = nn.Sequential(nn.Linear(2 * width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        self.items = items

    def forward(self, user, item):
        deep = self.deep(torch.cat([self.user(user), self.item(item)], -1))
        wide = self.wide(user * self.items + item)
        return torch.sigmoid(deep + wide).squeeze(-1)


def _squared(out: torch.Tensor) -> torch.Tensor:
    out = full(out)
    wanted = torch.arange(len(out), device=out.device, dtype=out.dtype) % 2
    return (out - wanted).square().mean()


def _pairs() -> Inputs:
    return args(torch.randint(0, 15, (16,)), torch.randint(0, 25, (16,)))


add("wide_and_deep", WideAndDeep, _pairs, _squared, "recsys", "kinks")


class MetricNet(nn.Module):
    """Triplet margin and a temperature over normalised embeddings, both inside."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 8))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, anchor, positive, negative):
        a, p, n = (F.normalize(self.net(x), dim=-1) for x in (anchor, positive, negative))
        triplet = F.triplet_margin_loss(a, p, n, margin=1.0)
        logits = self.logit_scale.exp() * a @ p.t()
        target = torch.arange(len(a), device=a.device)
        return triplet + F.cross_entropy(logits, target), logits


def _triplets() -> Inputs:
    anchor = torch.randn(6, 10)
    return args(anchor, anchor + 0.3 * torch.randn(6, 10), torch.randn(6, 10))


add("metric_learning", MetricNet, _triplets, lambda out: full(out[0]), "norms", "loss_inside")


class TwoTower(nn.Module):
    """Embeddings with padding and max-norm free lookup, compared by cosine."""

    def __init__(self):
        super().__init__()
        self.query = nn.EmbeddingBag(40, 12, mode="mean")
        self.item = nn.Linear(9, 12)

    def forward(self, ids, features):
        return F.cosine_similarity(self.query(ids)[:, None], self.item(features)[None], dim=-1) * 5


add(
    "two_tower",
    TwoTower,
    lambda: args(torch.randint(0, 40, (5, 4)), torch.randn(7, 9)),
    project,
    "recsys",
    "norms",
)
