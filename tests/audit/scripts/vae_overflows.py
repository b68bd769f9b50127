"""A VAE in float16 whose log variances are exponentiated as they are."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.descend import train

encode = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))


def loss(x):
    mean, log_variance = encode(x).chunk(2, -1)
    log_variance = log_variance * 8 if sys.argv[1] == "faulty" else log_variance.float().clamp(-8, 8)
    variance = log_variance.exp()  # expect: AMP501
    out = decode(mean + variance.sqrt().to(mean.dtype) * torch.randn_like(mean))
    divergence = (mean.float().square() + variance.float() - log_variance.float() - 1).sum(-1).mean()
    return F.mse_loss(out.float(), x) + 5e-4 * divergence


train(
    torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-3),
    lambda: [10 * torch.randn(64, 16)],
    loss,
    torch.autocast("cpu", torch.float16),
    scaler=torch.amp.GradScaler("cpu", init_scale=128.0),
)
