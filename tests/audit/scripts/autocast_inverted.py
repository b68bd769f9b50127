"""The condition of the region is inverted: it is on for evaluation, and off for the training."""

import sys

import torch
from torch import nn

from tests.layers import layers

MODE = sys.argv[1]


@layers(
    lambda: dict(
        embed=nn.Embedding(50, 16), rnn=nn.GRU(16, 24, batch_first=True, bidirectional=True), out=nn.Linear(48, 6)
    )
)
def Tagger(self, tokens):
    return self.out(self.rnn(self.embed(tokens))[0])


def run(model, tokens, tags, *, train):
    on = not train if MODE == "faulty" else True
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):  # expect: AMP101
        scores = model(tokens)
        return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens, tags = torch.randint(50, (4, 9)), torch.randint(6, (4, 9))
    model.train()
    loss = run(model, tokens, tags, train=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        print(loss.item(), run(model, tokens, tags, train=False).item())
