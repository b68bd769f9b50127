"""Five small architectures with a place for an overflow: "big" in forward, "loud" in backward alone."""

import torch
from torch import nn
from torch.nn import functional


class Louder(torch.autograd.Function):
    """Its gradient is 1e5 times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e5


class Plant(nn.Module):
    """Where the overflow is: ``kind`` "big", "loud", or "" for none."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "big":
            return (x.abs() + 1) * 1e5  # planted
        if self.kind == "loud":
            return Louder.apply(x)  # planted
        return x


class MLP(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.plant = nn.Linear(8, 16), nn.Linear(16, 4), Plant(kind)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.second(self.plant(self.dropout(functional.gelu(self.first(x)))))


class CNN(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.plant, self.head = Plant(kind), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(self.conv(self.plant(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.plant, self.mlp = Plant(kind), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.plant(x))


class GPT(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(20, 16), nn.Sequential(Block(""), Block(kind))
        self.head = nn.Linear(16, 20)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))[:, -1]


class LSTM(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)
        self.mix, self.plant = nn.Linear(8, 8), Plant(kind)

    def forward(self, ids):
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
