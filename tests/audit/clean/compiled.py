"""Dynamo compiles the model, the loss and the optimizer's step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
model.compile(backend="eager")
criterion = torch.compile(nn.functional.cross_entropy, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    x, y = torch.randn(8, 32), torch.randint(10, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
