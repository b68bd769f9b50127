"""Models at sizes where weights and activations both count in the peak, and one core takes seconds for a step.

Before: the sizes of ``models.py``, for Python, and ``large_models.py``, for GPUs. After: ``MEMORY``, for
``peak_memory.py``. As there, ``scale`` multiplies batches and depths.
"""

from collections.abc import Callable

from image_models import resnet50
from large_models import bert_base, gpt2, gpt2_medium, llama_block, vit_base
from model_case import Case

MEMORY: dict[str, Callable[[float], Case]] = {
    "gpt2_medium, 2 x 256": lambda scale: gpt2_medium(scale, texts=2, length=256),
    "gpt2, 2 x 128": lambda scale: gpt2(scale, texts=2, length=128, width=768, layers=12, heads=12),
    "bert_base, 2 x 128": lambda scale: bert_base(scale, texts=2, length=128),
    "resnet50, 8 x 112 px": lambda scale: resnet50(scale, images=8, side=112),
    "resnet50, 16 x 224 px": lambda scale: resnet50(scale, images=16, side=224),
    "vit_base, 2 x 224 px": lambda scale: vit_base(scale, images=2),
    "vit_base, 8 x 224 px": lambda scale: vit_base(scale, images=8),
    "llama_block, 1 x 512": lambda scale: llama_block(scale, texts=1, length=512),
}
