"""A contrastive loss is to be computed in fp32, and the region that disables autocast gets low values."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.descend import train

FAULTY = sys.argv[1] == "faulty"


def contrastive(left, right, temperature=0.07):
    with torch.autocast("cpu", enabled=False):  # expect: AMP104
        if not FAULTY:
            left, right = left.float(), right.float()
        scores = left @ right.t() / temperature
        return F.cross_entropy(scores, torch.arange(len(scores)))


towers = nn.ModuleDict({"image": nn.Linear(32, 16), "text": nn.Linear(24, 16)})
train(
    torch.optim.Adam(towers.parameters(), lr=1e-3),
    lambda: (torch.randn(8, 32), torch.randn(8, 24)),
    lambda images, texts: contrastive(towers["image"](images), towers["text"](texts)),
    steps=4,
)
