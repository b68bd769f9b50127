"""Small models in a few lines: a function over the layers that it names becomes a module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def layers(
    build: Callable[..., dict[str, Any]], seed: int | None = None, base: type[nn.Module] = nn.Module, **methods: Any
) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Make a class of modules out of a forward; ``build`` returns the layers, parameters and values of a new one.

    With ``seed``, all modules of the class begin with the same weights; ``methods``: what else the class has.
    """

    def of_forward(forward: Callable[..., Any]) -> type[nn.Module]:
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            base.__init__(self)
            if seed is not None:
                torch.manual_seed(seed)
            for name, value in build(*args, **kwargs).items():
                if isinstance(value, nn.Buffer):  # Dynamo breaks a graph at a write to an attribute of that class
                    self.register_buffer(name, value.detach(), value.persistent)
                else:
                    setattr(self, name, value)

        return forward_of(base, __init__=__init__, **methods)(forward)

    return of_forward


def words_and_head(rows: int, width: int, tied: bool = True, bias: bool = False, **options: Any) -> dict[str, Any]:
    """Return layers: a table of words, and a head; ``tied``: the head's weight is the table."""
    words, head = nn.Embedding(rows, width, **options), nn.Linear(width, rows, bias)
    if tied:
        head.weight = words.weight
    return dict(words=words, head=head)


def function_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Make an autograd function that saves all that it is given; ``backward`` is given the gradient, and then that."""

    def saving(ctx: Any, *given: torch.Tensor) -> Any:
        ctx.save_for_backward(*given)
        return forward(*given)

    def of_saved(ctx: Any, grad: torch.Tensor) -> Any:
        return backward(grad, *ctx.saved_tensors)

    methods = {"forward": staticmethod(saving), "backward": staticmethod(of_saved)}
    return type("Written", (torch.autograd.Function,), methods)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Return a layer with these weights; it draws random numbers as any layer does."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return layer


def forward_of(base: type[nn.Module], **methods: Any) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Make a class of modules out of another forward for the layers of ``base``; ``methods``: what else it has."""

    def of_forward(forward: Callable[..., Any]) -> type[nn.Module]:
        names = {"__module__": forward.__module__, "__qualname__": forward.__qualname__, "__doc__": forward.__doc__}
        return type(forward.__name__, (base,), {**names, **methods, "forward": forward})

    return of_forward
