"""accelerate, with its backward inside of its region of autocast."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

faulty = sys.argv[1] == "faulty"

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.utils.data.DataLoader([(torch.randn(32), 1) for _ in range(64)], batch_size=8)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
for x, y in data:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
            if faulty:
                accelerator.backward(loss)  # expect: AMP103
        if not faulty:
            accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(loss.item())
