"""Recommenders of deepctr-torch and torch-rechub: embeddings of many columns, crossed in as many ways."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.model import Batch, Table, args

TABLE = Table()
SPARSE, DENSE = 5, 3


def _deepctr(name: str, **how: Any) -> nn.Module:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(f"c{i}", 20, embedding_dim=8) for i in range(SPARSE)]
    columns += [DenseFeat(f"d{i}", 1) for i in range(DENSE)]
    deep = columns[:SPARSE] if name in ("AFM", "CCPM") else columns  # these two cross sparse columns alone
    linear = () if name == "PNN" else (columns,)
    return getattr(models, name)(*linear, deep, device="cpu", **how)


def _columns(size: int) -> Batch:
    return args(torch.cat([torch.randint(0, 20, (8 * size, SPARSE)).float(), torch.rand(8 * size, DENSE)], 1))


MODELS: dict[str, dict[str, Any]] = {
    name: {} for name in ("DeepFM", "xDeepFM", "WDL", "DCN", "DCNMix", "AutoInt", "NFM", "AFM", "DIFM", "ONN", "PNN")
} | {"FiBiNET": {}, "IFM": {}, "CCPM": {}, "MLR": {}, "AFN": {}}

for _name, _how in MODELS.items():
    TABLE.add("deepctr_torch", f"deepctr_torch/{_name}", partial(_deepctr, _name, **_how), _columns)


def _rechub(name: str, **how: Any) -> nn.Module:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models import ranking

    sparse = [SparseFeature(f"c{i}", vocab_size=20, embed_dim=8) for i in range(SPARSE)]
    dense = [DenseFeature(f"d{i}") for i in range(DENSE)]
    features = {"sparse": sparse, "dense": dense, "all": dense + sparse}
    mlp = {"dims": [32, 16], "dropout": 0.1, "activation": "relu"}
    return getattr(ranking, name)(**{word: features.get(value, value) for word, value in how.items()}, mlp_params=mlp)


def _named(size: int) -> Batch:
    found = {f"c{i}": torch.randint(0, 20, (8 * size,)) for i in range(SPARSE)}
    return args(found | {f"d{i}": torch.rand(8 * size) for i in range(DENSE)})


RECHUB: dict[str, dict[str, Any]] = {
    "WideDeep": {"wide_features": "dense", "deep_features": "sparse"},
    "DeepFM": {"deep_features": "dense", "fm_features": "sparse"},
    "DCN": {"features": "all", "n_cross_layers": 2},
    "DCNv2": {"features": "all", "n_cross_layers": 2},
    "EDCN": {"features": "sparse", "n_cross_layers": 2},
    "AutoInt": {"sparse_features": "sparse", "dense_features": "dense", "num_layers": 2, "num_heads": 2},
    "FiBiNet": {"features": "sparse"},
}
for _name, _how in RECHUB.items():
    TABLE.add("torch_rechub", f"torch_rechub/{_name}", partial(_rechub, _name, **_how), _named)
