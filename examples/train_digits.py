"""Train a small convolutional network in mixed precision: an ordinary training loop plus one line."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import amp_graph


def main(epochs: int = 10) -> float:
    """Train; return the accuracy on the held-out fifth of the images."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = torch.randperm(len(labels)).split([1440, 357])

    convs = [
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
    ]
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(64 * 3 * 3, 10))
    model = amp_graph.convert(model, "bf16")  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)

    for epoch in range(epochs):
        for batch in train[torch.randperm(len(train))].split(48):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
    print(f"held-out accuracy: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
