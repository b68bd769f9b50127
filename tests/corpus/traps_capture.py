"""Traps of capture: what breaks a graph, hides code from it, or gives a model an unusual face."""

import logging
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.layers import forward_of, layers

from .core import LSTM, add, args, normal
from .losses import classify, of, own, project, regress

logger = logging.getLogger("corpus")
WIDTH = 16


_rows = normal((6, WIDTH))


def _mlp(out: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, out))


@add("graph_break_logging", _rows, classify, "trap", "graph_break")
@layers(lambda: dict(first=_mlp(), second=_mlp(4)))
def LogsInForward(self, x):
    x = self.first(x)
    logger.info("mean activation %.3f", x.mean().item())
    return self.second(x)


@add("graph_break_branch", _rows, classify, "trap", "graph_break", "data_dependent")
@forward_of(LogsInForward)
def BranchesOnValue(self, x):
    x = self.first(x)
    x = x / x.abs().max() if x.abs().max().item() > 1e-3 else x
    return self.second(x)


@add("graph_break_print", _rows, classify, "trap", "graph_break")
@forward_of(LogsInForward)
def PrintsInForward(self, x):
    x = self.first(x)
    if x.shape[0] > 1:
        print(end="")
    return self.second(x)


@layers(
    lambda reentrant: dict(
        reentrant=reentrant,
        stem=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, 4),
        blocks=nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), *_mlp()) for _ in range(2)),
    )
)
def Checkpointed(self, x):
    x = self.stem(x)
    for block in self.blocks:
        x = x + checkpoint(block, x, use_reentrant=self.reentrant)
    return self.head(x)


add("checkpoint_reentrant", _rows, classify, "trap", "checkpoint", "graph_break")(lambda: Checkpointed(True))
add("checkpoint", _rows, classify, "trap", "checkpoint")(lambda: Checkpointed(False))


class StraightThrough(torch.autograd.Function):
    """A backward that is not the derivative of its forward: to retrace it is to lose it."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        inside = (x.abs() <= 2).to(grad.dtype)
        return grad * inside, (grad * x).sum().reshape(scale.shape).to(scale.dtype)


# Rounds to a grid: where the product lands beside a rounding border, one bit moves a whole step.
@add("custom_function", _rows, classify, "trap", "autograd_function", "discontinuous")
@layers(lambda: dict(first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 4), scale=nn.Parameter(torch.tensor(8.0))))
def Quantized(self, x):
    return self.second(StraightThrough.apply(self.first(x), self.scale))


@layers(lambda enabled: dict(enabled=enabled, first=_mlp(), second=_mlp(), third=_mlp(4)))
def NestedAutocast(self, x):
    x = self.first(x)
    if self.enabled:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=True):
            x = self.second(x)
    else:
        with torch.autocast(x.device.type, enabled=False):
            x = self.second(x.to(self.third[0].weight.dtype))
    return self.third(x.to(self.third[0].weight.dtype))


add("autocast_disabled_inside", _rows, classify, "trap", "nested_autocast")(lambda: NestedAutocast(False))
add("autocast_enabled_inside", _rows, classify, "trap", "nested_autocast")(lambda: NestedAutocast(True))


@add("no_grad_part", _rows, own, "trap", "no_grad", "loss_inside")
@layers(lambda: dict(net=_mlp(), predict=nn.Linear(WIDTH, WIDTH)))
def NoGradPart(self, x):
    """A target without gradients from weights that are trained as well: cast caches mix the two up."""
    with torch.no_grad():
        target = F.normalize(self.net(x + 0.1), dim=-1)
    online = F.normalize(self.predict(self.net(x)), dim=-1)
    return ((online - target) ** 2).sum(-1).mean()


@add("cond", _rows, classify, "trap", "higher_order")
@layers(lambda: dict(first=nn.Linear(WIDTH, WIDTH), left=nn.Linear(WIDTH, 4), right=nn.Linear(WIDTH, 4)))
def Cond(self, x):
    x = self.first(x)
    # Both branches use both layers: each parameter has a gradient whichever side is taken.
    return torch.cond(
        x.sum() > 0,
        lambda x: self.left(x).relu() + self.right(x),
        lambda x: self.left(x) - self.right(x).tanh(),
        (x,),
    )


@dataclass
class Detection:
    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


@layers(lambda kind: dict(kind=kind, boxes=_mlp(4), scores=_mlp(3)))
def Outputs(self, x):
    """The same computation behind different kinds of outputs."""
    boxes, scores = self.boxes(x), self.scores(x)
    labels = scores.argmax(-1)
    if self.kind == "dataclass":
        return Detection(boxes, scores, labels)
    if self.kind == "dict":
        return {"boxes": boxes, "extra": {"scores": scores, "labels": labels}, "name": "detector"}
    if self.kind == "list":
        return [boxes, scores, labels]
    return boxes, (scores, (labels, boxes * 2)), None


for kind in ("dataclass", "dict", "list", "nested_tuple"):
    add(f"output_{kind}", _rows, project, "trap", "outputs")(partial(Outputs, kind))


def _keywords():
    options = {"values": torch.randn(5, 3), "name": "values"}
    return args(torch.randn(6, WIDTH), keys=torch.randn(5, WIDTH), scale=0.5, options=options)


@add("keyword_inputs", _keywords, of("mixed", regress), "trap", "inputs")
@layers(lambda: dict(query=nn.Linear(WIDTH, 8), key=nn.Linear(WIDTH, 8)))
def KeywordInputs(self, query, *, keys, scale=1.0, options=None):
    weights = torch.softmax(self.query(query) @ self.key(keys).t() * scale, -1)
    return {"mixed": weights @ (options["values"] if options else keys), "weights": weights}


add("sequential_root", _rows, classify, "trap", "sequential_root", "nn_root")(lambda: _mlp(4))
add("linear_root", _rows, classify, "trap", "nn_root")(lambda: nn.Linear(WIDTH, 4))


_steps = normal((3, 7, WIDTH))


add("lstm_root", _steps, project, "trap", "nn_root", *LSTM)(lambda: nn.LSTM(WIDTH, 12, batch_first=True))
add("gru_root", _steps, project, "trap", "nn_root", "rnn")(lambda: nn.GRU(WIDTH, 12, batch_first=True))


@add("module_repeated", _rows, classify, "trap", "repeated")
@layers(lambda: dict(block=nn.Sequential(nn.LayerNorm(WIDTH), *_mlp()), head=nn.Linear(WIDTH, 4)))
def Repeated(self, x):
    """One block called three times: its weights need one cast, its activations three."""
    for _ in range(3):
        x = x + self.block(x)
    return self.head(x)
