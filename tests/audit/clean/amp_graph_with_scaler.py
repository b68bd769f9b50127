"""A converted model in fp16, and the scaler of amp_graph."""

import torch
from torch import nn

import amp_graph
from tests.layers import layers


@layers(lambda: dict(up=nn.Linear(16, 32), norm=nn.LayerNorm(32), down=nn.Linear(32, 4)))
def Net(self, x):
    return self.down(torch.relu(self.norm(self.up(x))))


model = amp_graph.convert(Net(), policy="fp16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = amp_graph.GradScaler(init_scale=2.0**10)
for _ in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
