"""What the parent of all trials does once, so that no trial spends time on it: imports, and the first conversions."""

import importlib
import os
import warnings
from typing import Any

import torch
from torch import nn

import amp_graph

# The packages whose import each model of them needs.
IMPORTS = {
    "transformers": (
        "transformers.modeling_utils",
        "transformers.generation",
        "transformers.models.auto.modeling_auto",
    ),
    "timm": ("timm",),
    "torchvision": ("torchvision.models",),
    "diffusers": ("diffusers",),
    "torch_geometric": ("torch_geometric.nn",),
    "segmentation_models_pytorch": ("segmentation_models_pytorch",),
    "monai": ("monai.networks.nets",),
}
_KEPT: list[Any] = []


def warm_up() -> None:
    """Set the process up for trials and convert small models, whose operations nearly all others have."""
    os.environ["AMP_GRAPH_STRICT"] = "1"  # a pass that fails is a fault here, though users' graphs do without it
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _define_operators_of_torchvision()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    for word in ("bf16", "fp16"):
        for model, x in ((encoder, torch.randn(2, 4, 16)), (images, torch.randn(2, 3, 8, 8))):
            amp_graph.convert(model, word)(x).sum().backward()
            amp_graph.revert(model)
    torch._dynamo.reset()


def import_for(package: str) -> str:
    """Import what all models of a package need; return why that fails."""
    try:
        for name in IMPORTS.get(package, ()):
            importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _define_operators_of_torchvision() -> None:
    """Define what torchvision's wheel, which is built for CUDA,
    lacks beside a torch without: two operators' names."""
    if not _KEPT and not torch.cuda.is_available():
        library = torch.library.Library("torchvision", "DEF")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
