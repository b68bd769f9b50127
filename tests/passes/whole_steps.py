"""Training steps as one graph: what several of them lose, what they leave in the model, and the text of the graph."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import amp_graph

SGD = partial(torch.optim.SGD, lr=0.1)


class Stepped(NamedTuple):
    """The losses of all steps, the model behind them, and the text of the step's graph."""

    losses: torch.Tensor
    model: nn.Module
    text: str


def stepped(
    make: Callable[[], nn.Module],
    loss: Callable[..., torch.Tensor] | None,
    batches: Iterable[tuple[Any, ...]],
    policy: str = "bf16",
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **options: Any,
) -> Stepped:
    """Take a step with each of ``batches``, from the model and the random numbers of one seed."""
    torch.manual_seed(0)
    model = make()
    step = amp_graph.TrainStep(model, loss, optimizer(model.parameters()), policy, **options)
    losses = torch.stack([step(*batch) for batch in batches]).detach()
    return Stepped(losses, model, step.graph_text())
