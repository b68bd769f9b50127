"""A norm written out in a float16 model: the sum of squares is beyond 65504."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"


def rms_norm(x):
    given = x if faulty else x.float()
    squares = given * given
    return (x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + 1e-6)).to(x.dtype)  # expect: AMP501


@layers(lambda: dict(enter=nn.Linear(8, 256), leave=nn.Linear(256, 2)))
def Net(self, x):
    return self.leave(rms_norm(self.enter(x)))


model = Net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    x, y = 20 * torch.randn(8, 8), torch.randint(2, (8,))
    loss = nn.functional.cross_entropy(model(x.half()).float(), y)
    descend(optimizer, loss)
