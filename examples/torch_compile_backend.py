"""Use amp_graph as a backend of torch.compile, and pass its graph on to another backend."""

from functools import partial

import torch
from torch import nn

from amp_graph.capture.dynamo_backend import amp_graph


def main() -> torch.dtype:
    """Run compiled models; return the dtype of the first layer's result."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    x, y = torch.randn(16, 32), torch.randint(8, (16,))
    seen = []

    def look(graph_module, example_inputs):
        """Take the place of another backend, such as "inductor": it receives the graph with its casts."""
        linear = next(n for n in graph_module.graph.nodes if n.target is nn.functional.linear)
        seen.append(linear.meta["val"].dtype)
        return graph_module.forward

    compiled = torch.compile(model, backend="amp_graph")  # by name, with the default policy
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    print(f"loss {loss.item():.3f}, gradients in {model[0].weight.grad.dtype}")

    compiled = torch.compile(model, backend=partial(amp_graph, policy="bf16,accuracy=fast", compile=look))
    compiled(x)
    print(f"the first layer computed in {seen[0]}")
    return seen[0]


if __name__ == "__main__":
    main()
