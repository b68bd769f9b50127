"""fully_shard with a policy that says how to gather parameters, and not how to reduce gradients."""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

reduced = None if sys.argv[1] == "faulty" else torch.float32
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)

model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
for layer in model:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(4, 16)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()  # expect: AMP904
    optimizer.step()
    print(loss.item())
