"""A small residual network in channels_last under bf16 autocast, with batch norms and an evaluation."""

import torch
from torch import nn

from tests.layers import layers


@layers(
    lambda given, made, stride: dict(
        conv1=nn.Conv2d(given, made, 3, stride, 1, bias=False),
        bn1=nn.BatchNorm2d(made),
        conv2=nn.Conv2d(made, made, 3, 1, 1, bias=False),
        bn2=nn.BatchNorm2d(made),
        short=nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)),
    )
)
def Block(self, x):
    out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
    return torch.relu(out + self.short(x))


def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        Block(16, 16, 1), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def train(model, criterion, optimizer):
    model.train()
    for step in range(4):
        images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
        target = torch.randint(10, (8,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(images), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


def evaluate(model):
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
        print(model(images).argmax(1).tolist())


if __name__ == "__main__":
    model = build().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    train(model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer)
    evaluate(model)
