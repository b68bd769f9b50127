"""An RNN whose Adam has bfloat16 states: the squares of its gradients do not decay."""

import sys

import torch
from torch import nn

from tests.layers import layers


@layers(
    lambda width=24: dict(
        embed=nn.Embedding(50, width), cell=nn.RNN(width, width, batch_first=True), head=nn.Linear(width, 5)
    )
)
def Tagger(self, tokens):
    return self.head(self.cell(self.embed(tokens))[0])


dtype = torch.bfloat16 if sys.argv[1] == "faulty" else torch.float32
model = Tagger().to(dtype)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
for _ in range(4):
    tokens, tags = torch.randint(50, (8, 12)), torch.randint(5, (8, 12))
    loss = criterion(model(tokens).float().flatten(0, 1), tags.flatten())
    model.zero_grad()
    loss.backward()
    optimizer.step()  # expect: AMP304
    print(f"{loss.item():.6f}")
