"""Generative and physical models: autoencoders, diffusion, radiance fields, volumes."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import add, args, normal
from .losses import classify, full, project, regress

_image = normal((4, 3, 16, 16))


@add("autoencoder", _image, regress, "cnn", "kinks")
@layers(
    lambda: dict(
        encode=nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Flatten(),
            nn.Linear(256, 12),
        ),
        widen=nn.Linear(12, 256),
        decode=nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()
        ),
    )
)
def Autoencoder(self, x):
    return self.decode(self.widen(self.encode(x)).view(-1, 16, 4, 4))


def _elbo(out):
    recon, kl = map(full, out)
    return regress(recon) + kl


@add("vae_random", normal((8, 20)), _elbo, "vae", "random")
@add("vae", lambda: args(torch.randn(8, 20), noise=torch.randn(8, 4)), _elbo, "vae", "kinks")
@layers(
    lambda: dict(
        encode=nn.Sequential(nn.Linear(20, 32), nn.ReLU()),
        mu=nn.Linear(32, 4),
        logvar=nn.Linear(32, 4),
        decode=nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 20)),
    )
)
def VAE(self, x, noise=None):
    h = self.encode(x)
    mu, logvar = self.mu(h), self.logvar(h)
    std = torch.exp(0.5 * logvar)
    eps = torch.randn_like(std) if noise is None else noise
    recon = self.decode(mu + eps * std)
    kl = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
    return recon, kl


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angle = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1)


@layers(
    lambda cin, cout, time: dict(
        norm1=nn.GroupNorm(4, cin),
        conv1=nn.Conv2d(cin, cout, 3, padding=1),
        time=nn.Linear(time, cout),
        norm2=nn.GroupNorm(4, cout),
        conv2=nn.Conv2d(cout, cout, 3, padding=1),
        skip=nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity(),
    )
)
def DiffusionBlock(self, x, emb):
    h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(emb))[:, :, None, None]
    return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


@add("diffusion_unet", lambda: args(torch.randn(2, 3, 8, 8), torch.tensor([3, 871])), regress, "cnn", "positions")
@layers(
    lambda width=8, time=16: dict(
        width=width,
        time=nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time)),
        start=nn.Conv2d(3, width, 3, padding=1),
        down=DiffusionBlock(width, width, time),
        pool=nn.Conv2d(width, width, 3, 2, 1),
        mid=DiffusionBlock(width, 2 * width, time),
        attn=nn.Linear(2 * width, 6 * width),
        up=DiffusionBlock(3 * width, width, time),
        end=nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)),
    )
)
def DiffusionUNet(self, x, t):
    emb = self.time(timestep_embedding(t, self.width).to(x.dtype))
    a = self.down(self.start(x), emb)
    b = self.mid(self.pool(a), emb)
    n, c, h, w = b.shape
    q, k, v = self.attn(b.flatten(2).transpose(1, 2)).chunk(3, -1)
    b = b + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, c, h, w)
    b = F.interpolate(b, scale_factor=2, mode="nearest")
    return self.end(self.up(torch.cat([a, b], 1), emb))


@add("nerf", lambda: args(torch.rand(8, 12, 3)), regress, "positions", "mlp", "kinks")
class NeRF(nn.Module):
    """Fourier features of the input coordinates, then a density and a colour, composed along the ray."""

    def __init__(self, bands=8, width=32):
        super().__init__()
        self.bands = bands
        self.trunk = nn.Sequential(nn.Linear(3 + 6 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)

    def encode(self, x):
        features = [x]
        for i in range(self.bands):
            features += [torch.sin(2.0**i * math.pi * x), torch.cos(2.0**i * math.pi * x)]
        return torch.cat(features, -1)

    def forward(self, points):
        h = self.trunk(self.encode(points))
        sigma, rgb = F.softplus(self.density(h)).squeeze(-1), torch.sigmoid(self.colour(h))
        alpha = 1 - torch.exp(-sigma * 0.2)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * passed)[..., None] * rgb).sum(1)


@add("conv3d", normal((2, 1, 6, 8, 8)), classify, "cnn", "volume", "kinks")
@layers(
    lambda: dict(
        net=nn.Sequential(
            nn.Conv3d(1, 6, 3, padding=1),
            nn.InstanceNorm3d(6, affine=True),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(6, 8, 3, padding=1),
            nn.Softplus(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
        ),
        head=nn.Linear(8, 4),
    )
)
def Conv3dNet(self, x):
    return self.head(self.net(x))


@add("gaussian_policy", normal((8, 6), (8, 2)), project, "mlp", "distribution")
@layers(
    lambda: dict(
        trunk=nn.Sequential(nn.Linear(6, 24), nn.Tanh()),
        mean=nn.Linear(24, 2),
        value=nn.Linear(24, 1),
        advantage=nn.Linear(24, 4),
        log_std=nn.Parameter(torch.full((2,), -0.5)),
    )
)
def Dueling(self, state, action):
    """Reinforcement learning: a Gaussian policy's log-probability and entropy, and a dueling value."""
    h = self.trunk(state)
    dist = torch.distributions.Normal(self.mean(h), self.log_std.exp(), validate_args=False)
    advantage = self.advantage(h)
    q = self.value(h) + advantage - advantage.mean(-1, keepdim=True)
    return dist.log_prob(action).sum(-1), dist.entropy().sum(-1), q


@add("dropout_mlp", normal((16, 10)), project, "mlp", "random", "sequential_root")
def _mlp():
    return nn.Sequential(nn.Linear(10, 32), nn.Mish(), nn.Dropout(0.3), nn.Linear(32, 4), nn.LogSoftmax(-1))
