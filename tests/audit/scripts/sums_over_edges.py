"""A graph network that adds the messages of edges into nodes, in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"


@layers(lambda width: dict(message=nn.Linear(width, width), update=nn.Linear(width, width)))
def Layer(self, nodes, start, end):
    messages = torch.relu(self.message(nodes))[start]
    if not faulty:
        messages = messages.float()
    total = messages.new_zeros(nodes.shape)
    total.index_add_(0, end, messages)  # expect: AMP403
    return nodes + torch.relu(self.update(total.to(nodes.dtype)))


nodes, edges = 20, 8000
model = nn.ModuleList((nn.Linear(4, 16), Layer(16), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(3):
    start, end = torch.randint(nodes, (2, edges))
    with torch.autocast("cpu", torch.bfloat16):
        out = model[2](model[1](model[0](torch.randn(nodes, 4)), start, end))
    loss = out.float().square().mean()
    descend(optimizer, loss)
