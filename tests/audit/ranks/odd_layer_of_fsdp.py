"""One layer of a sharded model is wrapped without the policy of its sisters."""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.layers import layers

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@layers(lambda: dict(layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(4))))
def Model(self, x):
    for layer in self.layers:
        x = torch.relu(layer(x.to(torch.float32)))
    return x


model = Model()
for number, layer in enumerate(model.layers):
    fully_shard(layer, **({} if number == 3 and sys.argv[1] == "faulty" else {"mp_policy": policy}))
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 16)).float() - 1).abs().mean()
    loss.backward()  # expect: AMP905
    optimizer.step()
    print(loss.item())
