"""A graph network that adds the messages of edges into nodes, in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers

COUNT = 20


@layers(lambda width: dict(message=nn.Linear(width, width), update=nn.Linear(width, width)))
def Layer(self, nodes, start, end):
    messages = torch.relu(self.message(nodes))[start]
    if sys.argv[1] != "faulty":
        messages = messages.float()
    total = messages.new_zeros(nodes.shape)
    total.index_add_(0, end, messages)  # expect: AMP403
    return nodes + torch.relu(self.update(total.to(nodes.dtype)))


model = nn.ModuleList((nn.Linear(4, 16), Layer(16), nn.Linear(16, 1)))
train(
    torch.optim.SGD(model.parameters(), lr=1e-4),
    lambda: (torch.randn(COUNT, 4), *torch.randint(COUNT, (2, 8000))),
    lambda nodes, *edges: model[2](model[1](model[0](nodes), *edges)).float().square().mean(),
)
