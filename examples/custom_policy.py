"""Choose precisions without changing the model: by a TOML list, by module path, and by operation."""

from pathlib import Path

import torch
from torch import nn

import amp_graph

LIST = Path(__file__).with_name("my_list.toml")


class Net(nn.Module):
    """A model whose code does not mention precision."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        for layer in self.encoder:
            x = nn.functional.gelu(layer(x))
        return self.head(x.tanh())


def main() -> dict[str, str]:
    """Convert with a policy; print and return the precision of each operation."""
    policy = amp_graph.Policy(
        dtype="bf16",
        lists=(str(LIST),),  # gelu and the module "head" in fp32
        keep_fp32=r"encoder\.0",  # the first layer as well
        deny=("tanh",),  # and tanh, everywhere in the model
    )
    print(f"as text: {policy}")
    model = amp_graph.convert(Net(), policy)
    model(torch.randn(8, 32)).sum().backward()

    found = {}
    for node in amp_graph.report(model).graphs[0].nodes:
        if node.cls == "cast":
            continue
        operation = ", ".join(op.removeprefix("aten.") for op in node.ops)
        found[f"{node.module} {operation}"] = node.precision
        print(f"{node.module:10s} {operation:7s} {node.precision:5s} {node.reason}")
    return found


if __name__ == "__main__":
    main()
