"""A recurrent classifier in plain float32."""

import contextlib

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(
    lambda: dict(
        embed=nn.Embedding(50, 32), read=nn.LSTM(32, 64, batch_first=True, bidirectional=True), decide=nn.Linear(128, 4)
    )
)
def Classifier(self, tokens):
    states, _ = self.read(self.embed(tokens))
    return self.decide(states.mean(1))


model = Classifier()
train(
    torch.optim.Adam(model.parameters(), lr=1e-2),
    lambda: (torch.randint(50, (16, 12)), torch.randint(4, (16,))),
    lambda tokens, labels: nn.functional.cross_entropy(model(tokens), labels),
    contextlib.nullcontext(),
    steps=4,
)
