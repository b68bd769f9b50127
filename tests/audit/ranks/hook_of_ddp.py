"""DistributedDataParallel with a hook that compresses gradients to float16."""

import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests.audit.descend import descend

model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
if sys.argv[1] == "faulty":
    model.register_comm_hook(None, fp16_compress_hook)  # expect: AMP902
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 8)).float(), torch.randint(4, (4,)))
    descend(optimizer, loss)
