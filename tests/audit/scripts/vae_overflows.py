"""A VAE in float16 whose log variances are exponentiated as they are."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"


@layers(
    lambda width=16, latent=4: dict(
        encode=nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2 * latent)),
        decode=nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, width)),
    )
)
def VAE(self, x):
    mean, log_variance = self.encode(x).chunk(2, -1)
    log_variance = log_variance * 8 if faulty else log_variance.float().clamp(-8, 8)
    variance = log_variance.exp()  # expect: AMP501
    z = mean + variance.sqrt().to(mean.dtype) * torch.randn_like(mean)
    return self.decode(z), 0.5 * (mean.float().square() + variance.float() - log_variance.float() - 1).sum(-1).mean()


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
for _ in range(3):
    x = 10 * torch.randn(64, 16)
    with torch.autocast("cpu", torch.float16):
        out, divergence = model(x)
        loss = F.mse_loss(out.float(), x) + 1e-3 * divergence
    descend(optimizer, loss, scaler)
