"""Models whose weights are frozen, with low-rank adapters beside their linears that train.

Before: ``gpt(1.0)``, all of which trains. After: ``with_adapters(gpt(1.0))``, of which 1 weight in 100 does.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from model_case import Case
from torch import Tensor, nn

RANK = 8


class Adapted(nn.Module):
    """A frozen linear, and the product of two narrow ones added to it: at first nothing, as the second is zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in]."""
        return self.frozen(x) + self.up(self.down(x))


def with_adapters(made: Case) -> Case:
    """Freeze the model of a case, and give all linears in its ``blocks`` adapters."""
    made.model.requires_grad_(False)
    for module in list(made.model.blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return made
