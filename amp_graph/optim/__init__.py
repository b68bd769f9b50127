"""Optimizers, and updates of parameters: ``amp_graph.optim.AdamW`` and the others have torch's names.

Updates by torch's fused kernels or in one pass of C, fp32 master weights, gradients of embeddings as rows.
Imports ``passes`` and the top of ``amp_graph``; ``scaling``, ``capture`` and ``step`` import from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_graph.optim.optimizers import SGD as SGD
    from amp_graph.optim.optimizers import Adagrad as Adagrad
    from amp_graph.optim.optimizers import Adam as Adam
    from amp_graph.optim.optimizers import AdamW as AdamW

__all__ = ["SGD", "Adagrad", "Adam", "AdamW"]

if not TYPE_CHECKING:  # type checkers would accept any name otherwise

    def __getattr__(name: str) -> Any:
        """Import an optimizer at its first use; for another name of torch.optim's raise an error that lists them."""
        if name in __all__:
            return getattr(importlib.import_module("amp_graph.optim.optimizers"), name)
        hint = ""
        torch_optim = importlib.import_module("torch.optim")
        if hasattr(torch_optim, name):
            hint = f"\n  legal: {', '.join(__all__)}\n  fix:   torch.optim.{name}, which works with any converted model"
        raise AttributeError(f"module 'amp_graph.optim' has no attribute {name!r}{hint}")
