"""Attention written by hand: rotary, cross-attention, einsum, capsules, experts, RMS norms."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

from .core import add, args, normal
from .losses import classify, project, regress

WIDTH = 32


@layers(lambda width, eps=1e-06: dict(weight=nn.Parameter(torch.ones(width)), eps=eps))
def RMSNorm(self, x):
    variance = x.pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(variance + self.eps))


_sequence = normal((3, 10, WIDTH))


@add("rms_norm_by_hand", _sequence, classify, "rms_norm")
@layers(
    lambda width=WIDTH: dict(
        norm=RMSNorm(width),
        gate=nn.Linear(width, 64, bias=False),
        up=nn.Linear(width, 64, bias=False),
        down=nn.Linear(64, width, bias=False),
        norm_f=nn.RMSNorm(width),
        head=nn.Linear(width, 6),
    )
)
def GatedMLP(self, x):
    y = self.norm(x)
    x = x + self.down(F.silu(self.gate(y)) * self.up(y))
    return self.head(self.norm_f(x))


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


@add("rotary_mqa", _sequence, regress, "attention", "positions")
@layers(
    lambda width=WIDTH, heads=4, base=10000.0: dict(
        heads=heads,
        dim=(dim := width // heads),
        q=nn.Linear(width, width, bias=False),
        kv=nn.Linear(width, 2 * dim, bias=False),
        o=nn.Linear(width, width, bias=False),
        inv_freq=nn.Buffer(1.0 / base ** (torch.arange(0, dim, 2).float() / dim), persistent=False),
    )
)
def RotaryAttention(self, x):
    b, t, c = x.shape
    q = self.q(x).view(b, t, self.heads, self.dim).transpose(1, 2)
    k, v = self.kv(x).view(b, t, 1, 2 * self.dim).transpose(1, 2).chunk(2, dim=-1)
    angle = torch.outer(torch.arange(t, device=x.device, dtype=self.inv_freq.dtype), self.inv_freq)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
    scores = q @ k.transpose(-2, -1) / self.dim**0.5
    causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    y = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q) @ v
    return self.o(y.transpose(1, 2).reshape(b, t, c))


def _masked_bytes():
    mask = torch.rand(3, 15) > 0.2
    return args(torch.randn(3, 15, 10), mask=mask)


@add("perceiver", _masked_bytes, classify, "attention")
@layers(
    lambda width=24, latents=6: dict(
        latents=nn.Parameter(torch.randn(latents, width) * 0.5),
        project=nn.Linear(10, width),
        norm_q=nn.LayerNorm(width),
        norm_kv=nn.LayerNorm(width),
        q=nn.Linear(width, width),
        kv=nn.Linear(width, 2 * width),
        out=nn.Linear(width, width),
        head=nn.Linear(width, 5),
    )
)
def Perceiver(self, x, mask=None):
    kv = self.norm_kv(self.project(x))
    q = self.q(self.norm_q(self.latents)).expand(x.shape[0], -1, -1)
    k, v = self.kv(kv).chunk(2, dim=-1)
    bias = None if mask is None else mask[:, None, :].expand(-1, q.shape[1], -1)
    latents = self.latents + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    return self.head(latents.mean(1))


def _of_each_head(width, heads):
    return nn.Parameter(torch.randn(width, heads, width // heads) * width**-0.5)


@add("einsum_attention", _sequence, classify, "attention", "einsum")
@layers(
    lambda width=WIDTH, heads=4: dict(
        wq=_of_each_head(width, heads),
        wk=_of_each_head(width, heads),
        wv=_of_each_head(width, heads),
        wo=nn.Parameter(torch.randn(heads, width // heads, width) * width**-0.5),
        bilinear=nn.Parameter(torch.randn(5, width, width) / width),
    )
)
def EinsumAttention(self, x):
    """Every product an einsum, as in models that came from JAX."""
    q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (self.wq, self.wk, self.wv))
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
    y = x + torch.einsum("bhqk,bhkd,hdc->bqc", weights, v, self.wo)
    return torch.einsum("bi,nij,bj->bn", y.mean(1), self.bilinear, y.amax(1))


def squash(s, dim=-1):
    squared = (s**2).sum(dim=dim, keepdim=True)
    return squared / (1 + squared) * s / (squared.sqrt() + 1e-8)


@add("capsule_squash", normal((3, 12, 8)), classify, "norms")
@layers(
    lambda inputs=12, outputs=4, dim=6: dict(
        outputs=outputs, weight=nn.Parameter(torch.randn(outputs, inputs, 8, dim) * 0.4)
    )
)
def Capsules(self, u):
    u = squash(u)
    votes = (u[:, None, :, None, :] @ self.weight).squeeze(3)
    logits = votes.new_zeros(*votes.shape[:3], 1)
    for _ in range(3):
        route = logits.softmax(dim=1)
        v = squash((route * votes).sum(2))
        logits = logits + (votes * v[:, :, None, :]).sum(-1, keepdim=True)
    return v.norm(dim=-1)


@add("moe_index_add", normal((4, 12, 16)), project, "moe", "data_dependent", "inplace")
@layers(
    lambda width=16, experts=4: dict(
        router=nn.Linear(width, experts, bias=False),
        experts=nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(experts)
        ),
    )
)
def MixtureOfExperts(self, x):
    """Top-2 routing, gathered with boolean masks and added back in place."""
    flat = x.reshape(-1, x.shape[-1])
    gates, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
    gates = gates / gates.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        out.index_add_(0, token, (expert(flat[token]) * gates[token, slot, None]).to(out.dtype))
    return (x + out.view_as(x)).mean(1)
