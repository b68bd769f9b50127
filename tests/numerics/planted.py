"""Five small models, each with a part in the middle in which a value, or only a gradient, leaves fp16's range.

``Plant`` is the identity up to rounding. ``"forward"``: its values reach 1e5 and more, its gradients stay small.
``"backward"``: its values shrink to a 512th, and so its gradients grow 512 times. ``"coarse"``: a matmul
adds a large bias, which rounds away most of the value; no neighbor of it can prevent that.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers, linear_of

# What fp16 without a loss scale is warned of.
SILENT = "ignore:.*(gradients|nothing in this process scales):amp_graph.errors.AmpGraphWarning"
FORWARD = {"plant:mul.1", "plant:div"}  # what makes the large value, and what reads it
BACKWARD = {"plant:mul", "plant:mul.1"}
COARSE = "plant.coarse:linear"  # what rounds away the value
KEPT = {"forward": FORWARD, "backward": BACKWARD}


class Plant(nn.Module):
    """The identity, by way of values or gradients that fp16 cannot hold; no constant is out of its range."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "coarse":
            self.coarse = linear_of(torch.eye(width), torch.full((width,), 300.0))

    def forward(self, x):
        if self.kind == "forward":
            return x * 600.0 * 400.0 / 600.0 / 400.0  # planted
        if self.kind == "backward":
            return x * 2.0**-9 * 2.0**9  # planted
        if self.kind == "coarse":
            return self.coarse(x) - 300.0
        return x


@layers(lambda kind: dict(first=nn.Linear(16, 32), plant=Plant(kind, 32), last=nn.Linear(32, 4)))
def MLP(self, x):
    return self.last(torch.relu(self.plant(self.first(x))))


@layers(
    lambda kind: dict(
        first=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        plant=Plant(kind, 8),
        second=nn.Conv2d(8, 8, 3),
        last=nn.Linear(8, 4),
    )
)
def CNN(self, x):
    h = torch.relu(self.norm(self.first(x)))
    return self.last(torch.relu(self.second(self.plant(h))).mean((2, 3)))


@layers(
    lambda plant: dict(
        plant=plant,
        norm=nn.LayerNorm(16),
        qkv=nn.Linear(16, 48),
        out=nn.Linear(16, 16),
        norm2=nn.LayerNorm(16),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
    )
)
def Block(self, x):
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
    x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    return x + self.plant(self.down(F.gelu(self.up(self.norm2(x)))))


@layers(
    lambda kind: dict(
        plant=(plant := Plant(kind, 16)),
        embed=nn.Embedding(32, 16),
        one=Block(plant),
        two=Block(nn.Identity()),
        norm=nn.LayerNorm(16),
        last=nn.Linear(16, 4),
    )
)
def GPT(self, ids):
    return self.last(self.norm(self.two(self.one(self.embed(ids))))).mean(1)


@layers(
    lambda kind: dict(
        lstm=nn.LSTM(8, 16, batch_first=True), middle=nn.Linear(16, 16), plant=Plant(kind, 16), last=nn.Linear(16, 4)
    )
)
def LSTM(self, x):
    return self.last(self.plant(self.middle(self.lstm(x)[0]))[:, -1])


def _bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=32, max_position_embeddings=16, **rates, **sizes))


@layers(lambda kind: dict(bert=_bert(), middle=nn.Linear(16, 16), plant=Plant(kind, 16), last=nn.Linear(16, 4)))
def BERT(self, ids):
    return self.last(self.plant(self.middle(self.bert(ids).last_hidden_state)).mean(1))


INPUTS: dict[type, Callable[[], torch.Tensor]] = {
    MLP: lambda: torch.randn(8, 16),
    CNN: lambda: torch.randn(4, 3, 10, 10),
    GPT: lambda: torch.randint(0, 32, (4, 8)),
    LSTM: lambda: torch.randn(4, 6, 8),
    BERT: lambda: torch.randint(0, 32, (4, 8)),
}
MODELS = {kind.__name__: kind for kind in INPUTS}


def made(name, kind="forward", count=3):
    """Return a model, batches, and a loss function whose gradients at the plant are of 150 at most."""
    torch.manual_seed(0)
    model = MODELS[name](kind)
    batches = [(INPUTS[MODELS[name]](), torch.randn(4 if name != "MLP" else 8, 4)) for _ in range(count)]
    if kind != "backward":
        return model, batches, F.mse_loss
    seen = []
    hook = model.plant.register_full_backward_hook(lambda _, __, out: seen.append(float(out[0].abs().max())))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
    hook.remove()
    model.zero_grad()
    model.load_state_dict(buffers, strict=False)
    factor = 150.0 / max(seen)
    return model, batches, lambda out, y: F.mse_loss(out, y) * factor


def classified(name, kind):
    """Return a model, and a batch ``(inputs, labels)``."""
    model, ((x, y),), _ = made(name, kind, count=1)
    return model, (x, torch.randint(4, (len(y),)))
