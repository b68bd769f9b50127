"""See which operation of a model runs in which precision, and why."""

import torch
from torch import nn

import amp_graph


class Net(nn.Module):
    """Attention written out, so that the report shows each of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus the attention's result."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1)
        return x + self.out(weights @ v)


def main() -> str:
    """Print the report of the model; return it."""
    model = amp_graph.convert(Net(), "bf16")
    model(torch.randn(4, 16, 32)).sum().backward()  # the first call captures the model
    text = amp_graph.report(model).text()
    print(text)
    return text


if __name__ == "__main__":
    main()
