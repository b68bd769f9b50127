"""A CNN with batch norm under bf16 autocast, in channels_last, with momentum and a schedule."""

import torch
from torch import nn

from tests.layers import layers


def layer(inside, outside, stride):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(True))


@layers(
    lambda: dict(
        stem=layer(3, 16, 1),
        first=nn.Sequential(layer(16, 16, 1), layer(16, 16, 1)),
        second=layer(16, 32, 2),
        head=nn.Linear(32, 10),
    )
)
def Net(self, x):
    x = self.stem(x)
    return self.head(self.second(x + self.first(x)).mean((2, 3)))


model = Net().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
for _ in range(6):
    images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), torch.randint(10, (8,)), label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(loss.item())
