"""Five small architectures with a place for an overflow: "big" in forward, "loud" in backward alone."""

import torch
from torch import nn
from torch.nn import functional

from tests.layers import layers


class Louder(torch.autograd.Function):
    """Its gradient is 1e5 times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e5


@layers(lambda kind: dict(kind=kind))
def Plant(self, x):
    """Where the overflow is: ``kind`` "big", "loud", or "" for none."""
    if self.kind == "big":
        return (x.abs() + 1) * 1e5  # planted
    if self.kind == "loud":
        return Louder.apply(x)  # planted
    return x


@layers(lambda kind: dict(first=nn.Linear(8, 16), second=nn.Linear(16, 4), plant=Plant(kind), dropout=nn.Dropout(0.1)))
def MLP(self, x):
    return self.second(self.plant(self.dropout(functional.gelu(self.first(x)))))


@layers(
    lambda kind: dict(
        stem=nn.Conv2d(3, 8, 3, padding=1),
        norm=nn.BatchNorm2d(8),
        conv=nn.Conv2d(8, 8, 3),
        plant=Plant(kind),
        head=nn.Linear(8, 4),
    )
)
def CNN(self, x):
    x = torch.relu(self.norm(self.stem(x)))
    return self.head(self.conv(self.plant(x)).mean((2, 3)))


@layers(
    lambda kind: dict(
        norm=nn.LayerNorm(16),
        qkv=nn.Linear(16, 48),
        out=nn.Linear(16, 16),
        plant=Plant(kind),
        mlp=nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    )
)
def Block(self, x):
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + self.out(mixed)
    return x + self.mlp(self.plant(x))


@layers(
    lambda kind: dict(embed=nn.Embedding(20, 16), blocks=nn.Sequential(Block(""), Block(kind)), head=nn.Linear(16, 20))
)
def GPT(self, ids):
    return self.head(self.blocks(self.embed(ids)))[:, -1]


@layers(
    lambda kind: dict(
        embed=nn.Embedding(20, 8),
        lstm=nn.LSTM(8, 8, batch_first=True),
        head=nn.Linear(8, 4),
        mix=nn.Linear(8, 8),
        plant=Plant(kind),
    )
)
def LSTM(self, ids):
    return self.head(self.plant(self.mix(self.lstm(self.embed(ids))[0][:, -1])))


class Bert(nn.Module):
    def __init__(self, kind):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=4, **sizes))
        self.bert.bert.encoder.layer[1].intermediate.intermediate_act_fn = Plant(kind)

    def forward(self, ids):
        return self.bert(input_ids=ids).logits


def _ids():
    return torch.randint(20, (3, 6))


MODELS = {
    "mlp": (MLP, lambda: torch.randn(5, 8)),
    "cnn": (CNN, lambda: torch.randn(2, 3, 8, 8)),
    "gpt": (GPT, _ids),
    "lstm": (LSTM, _ids),
    "bert": (Bert, _ids),
}


def made(name, kind):
    """Return a model, and a batch ``(inputs, labels)`` for it."""
    kind_of, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = kind_of(kind), inputs()
    return model, (x, torch.randint(4, (len(x),)))
