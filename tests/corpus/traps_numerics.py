"""Traps of precision: constants, positions, casts and operations that are wrong, or missing, in 16 bits."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import forward_of, layers

from .core import add, args, normal
from .losses import classify, own, project, regress

WIDTH = 16


_rows = normal((6, WIDTH))


_steps = normal((3, 8, WIDTH))


@add("finfo_min_mask", _steps, regress, "trap", "constants", "attention")
@layers(lambda: dict(qk=nn.Linear(WIDTH, 2 * WIDTH), v=nn.Linear(WIDTH, WIDTH)))
def FinfoMin(self, x):
    """The smallest number of a dtype that capture resolved: in a fill, a where, a full and a clamp."""
    q, k = self.qk(x).chunk(2, -1)
    scores = q @ k.transpose(1, 2) / 4
    low = torch.finfo(scores.dtype).min
    causal = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
    a = scores.masked_fill(~causal, low).softmax(-1)
    bias = torch.full((8, 8), low, dtype=scores.dtype, device=x.device).triu(1)
    b = torch.clamp(scores + bias, min=low).softmax(-1)
    c = torch.where(causal, scores, torch.tensor(low, dtype=scores.dtype, device=x.device)).softmax(-1)
    return (a + b + c) @ self.v(x)


@add("large_positions", _steps, classify, "trap", "positions")
@layers(lambda offset=70000: dict(offset=offset, net=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 4)))
def LargePositions(self, x):
    """Positions above 65536: in bf16 neighbours collapse, in fp16 they are infinite."""
    position = torch.arange(self.offset, self.offset + x.shape[1], device=x.device).float()
    rate = torch.exp(torch.arange(0, WIDTH, 2, device=x.device).float() * (-math.log(10000.0) / WIDTH))
    angle = position[:, None] * rate
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(x.dtype)
    return self.head(self.net(x) + table)


@add(
    "rotary_matmul",
    lambda: args(torch.randn(2, 8, WIDTH), torch.arange(3000, 3008).repeat(2, 1)),
    regress,
    "trap",
    "positions",
    "nested_autocast",
)
@layers(
    lambda: dict(
        q=nn.Linear(WIDTH, WIDTH), inv_freq=nn.Buffer(1.0 / 10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    )
)
def PositionMatmul(self, x, position_ids):
    """Rotary frequencies as HF writes them: a product of positions inside autocast(enabled=False)."""
    q = self.q(x)
    inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
    with torch.autocast(device_type=x.device.type, enabled=False):
        freqs = (inv_freq @ position_ids[:, None, :].float()).transpose(1, 2)
        angle = torch.cat((freqs, freqs), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


@add("complex_rotary", _steps, regress, "trap", "complex")
@layers(lambda: dict(q=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, WIDTH)))
def ComplexRotary(self, x):
    q = self.q(x)
    rate = 1.0 / 100 ** (torch.arange(0, WIDTH, 2, device=x.device).float() / WIDTH)
    angle = torch.outer(torch.arange(x.shape[1], device=x.device), rate)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2)) * turn
    return self.out(torch.view_as_real(turned).flatten(-2).type_as(x))


@add("user_casts", _rows, regress, "trap", "user_cast")
@layers(lambda: dict(first=nn.Linear(WIDTH, 32), second=nn.Linear(32, WIDTH), norm=nn.LayerNorm(WIDTH)))
def UserCasts(self, x):
    """`.float()`, `.to(dtype)` and `.type_as` are instructions."""
    h = self.first(x)
    gate = torch.sigmoid(h.float()).type_as(h)
    y = self.second(h * gate).to(torch.float32)
    return self.norm(y.to(x.dtype) + x)


@add("user_half", _rows, regress, "trap", "user_cast")
@forward_of(UserCasts)
def HalfPart(self, x):
    """A part that the user computes in half precision himself."""
    h = self.first(x).half().mul(1.5).bfloat16().to(x.dtype)
    return self.norm(self.second(h) + x)


@add("float64_part", _rows, regress, "trap", "user_cast", "float64")
@forward_of(UserCasts)
def DoublePart(self, x):
    """A part in float64: it stays there."""
    h = self.first(x)
    total = torch.cumsum(h.double() ** 2, -1).sqrt().to(h.dtype)
    return self.norm(self.second(h + total) + x)


@add("tanh_gelu_pow", _rows, regress, "trap", "pow")
@layers(lambda: dict(first=nn.Linear(WIDTH, 48), second=nn.Linear(48, WIDTH)))
def TanhGelu(self, x):
    """The GELU of GPT-2 by hand: an integer power between two matrix products."""
    x = self.first(x)
    x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    return self.second(x)


@add("losses_inside", lambda: args(torch.randn(6, WIDTH), torch.randint(0, 5, (6,))), own, "trap", "loss_inside")
@layers(lambda: dict(net=nn.Linear(WIDTH, 5), gate=nn.Linear(WIDTH, 1)))
def LossInside(self, x, target):
    logits = self.net(x)
    keep = torch.sigmoid(self.gate(x)).squeeze(-1)
    loss = F.cross_entropy(logits, target, label_smoothing=0.1) + F.l1_loss(keep, (target > 2).to(keep.dtype))
    log_probs = F.log_softmax(logits, -1)
    loss = loss + F.kl_div(log_probs, logits.detach().softmax(-1).roll(1, -1), reduction="batchmean")
    return loss + 0.01 * torch.logsumexp(logits, -1).square().mean()


@add("large_sum", _rows, classify, "trap", "fp16_overflow", "norms")
@layers(lambda: dict(net=nn.Linear(WIDTH, 64), head=nn.Linear(65, 4)))
def LargeSum(self, x):
    """Squares that sum above 65504: infinite where fp16 leaves the sum in fp16."""
    h = self.net(x * 60)
    energy = (h * h).sum(-1, keepdim=True)
    return self.head(torch.cat([h * torch.rsqrt(energy / 64 + 1e-6), torch.log1p(energy)], -1))


@add("weight_norm_lora", _rows, project, "trap", "parametrized")
@layers(
    lambda: dict(
        normed=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 12)),
        low_a=nn.Parameter(torch.randn(12, 2) * 0.3),
        low_b=nn.Parameter(torch.randn(2, 12) * 0.3),
        base=nn.Linear(12, 12),
    )
)
def WeightNorm(self, x):
    """Weights that are computed in forward, by parametrisation and by hand."""
    h = self.normed(x)
    return h + F.linear(h, self.base.weight + self.low_a @ self.low_b, self.base.bias)


@add("integer_only", lambda: args(torch.randint(0, 50, (4, 9))), lambda out: out.float().mean(), "trap", "integer")
@layers(lambda: dict(table=nn.Buffer(torch.randint(0, 100, (50,)))))
def IntegerOnly(self, ids):
    """No floating-point parameter and no gradient: nothing to do, and nothing to fail at."""
    return (self.table[ids] * 3 + 1).cumsum(-1) % 17
