"""Where elementwise operations and reductions are ill-conditioned, and chains that lead an argument there.

Before: ``CALLS["sin"]``. After: its call, and the ends of the range of its arguments.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 32
SIGNS = torch.tensor([1.0, -1.0]).repeat(SIZE // 2)  # neighbours nearly cancel


class Call(NamedTuple):
    """A function of a tensor [SIZE, SIZE], and the ends of the range of its arguments."""

    function: Callable[[Tensor], Tensor]
    low: float
    high: float


def _calls(names: str, low: float, high: float, *more: Any) -> dict[str, Call]:
    """Return the calls of functions of torch, with the arguments ``more`` behind the tensor."""
    found = {}
    for name in names.split():
        owner = next(o for o in (torch, F, torch.special) if hasattr(o, name.removeprefix("special_")))
        owner = torch.special if name.startswith("special_") else owner
        found[name] = Call(partial(_first, getattr(owner, name.removeprefix("special_")), more), low, high)
    return found


def _first(function: Any, more: tuple[Any, ...], x: Tensor) -> Tensor:
    made = function(x, *more)
    return made if isinstance(made, Tensor) else made[0]


CALLS = {
    **_calls("exp exp2 expm1 cosh sinh special_expm1 special_exp2 i0 special_i0 special_i1", 5.0, 8.0),
    **_calls("log log2 log10 special_entr", 0.999, 1.001),
    **_calls("log1p special_log1p", -0.999, -0.99),
    **_calls("logit special_logit acos asin arccos arcsin atanh arctanh erfinv special_erfinv", 0.99, 0.9999),
    **_calls("acosh arccosh", 1.001, 1.01),
    **_calls("asinh arcsinh atan arctan", 50.0, 60.0),
    **_calls("logsumexp log_softmax softmax special_softmax special_log_softmax special_logsumexp", 100.0, 110.0, -1),
    **_calls("logcumsumexp cumsum cumprod prod var std", 0.9, 1.1, -1),
    **_calls("softplus logsigmoid gelu silu mish sigmoid special_expit elu celu selu glu", -9.0, -4.0),
    **_calls("sqrt rsqrt reciprocal square", 1e-2, 1.0),
    **_calls("cos sin sinc special_sinc", 1000.0, 4000.0),
    **_calls("tan", 1000.0, 1000.3),
    **_calls("digamma lgamma special_gammaln special_psi", 1.4, 1.5),
    **_calls("special_i0e special_i1e special_erfcx special_ndtri special_ndtr special_log_ndtr", 0.3, 0.9),
    **_calls("tanh erf special_erf erfc special_erfc", 2.0, 4.0),
    **_calls("hardswish hardsigmoid", -2.99, -2.9),
    **_calls("relu6 hardtanh", 0.9, 1.1),
    **_calls("leaky_relu relu abs neg deg2rad rad2deg nan_to_num", -1.0, 1.0),
    **_calls("hardshrink softshrink", 0.51, 0.52),
    **_calls("threshold", 0.51, 0.52, 0.5, 0.0),
    **_calls("clamp clip clamp_min clamp_max", 99.0, 101.0, 100.0),
    **_calls("floor ceil round trunc fix frac sign sgn", 1000.0, 1010.0),
    **_calls("remainder fmod", 1000.0, 1100.0, 0.7),
    **_calls("pow", 0.9, 1.1, 40),
    **_calls("sum nansum mean nanmean amax amin median nanmedian cummax cummin max min", 100.0, 101.0, -1),
    **_calls("kthvalue topk", 100.0, 101.0, 4),
    **_calls("sort msort diff", 100.0, 101.0),
    **_calls("norm", 0.01, 1.0, 2, -1),
    **_calls("var_mean std_mean", 100.0, 101.0, -1),
    **_calls("mvlgamma", 1.4, 1.5, 1),
}
CALLS |= {name: Call(*call) for name, call in {
    "sum of terms that cancel": (lambda x: (x * SIGNS).sum(-1), 100.0, 101.0),
    "mean of terms that cancel": (lambda x: (x * SIGNS).mean(-1), 100.0, 101.0),
    "trace": (lambda x: (x * SIGNS).trace()[None], 100.0, 101.0),
    "avg_pool1d": (lambda x: F.avg_pool1d((x * SIGNS)[None], 2)[0], 100.0, 101.0),
    "interpolate": (lambda x: F.interpolate((x * SIGNS)[None], scale_factor=0.5, mode="linear")[0], 100.0, 101.0),
    "var of large": (lambda x: x.var(-1), 100.0, 101.0),
    "std of large": (lambda x: x.std(-1), 100.0, 101.0),
    "sub": (lambda x: x - x.roll(1, -1), 100.0, 101.0),
    "rsub": (lambda x: 1 - x, 0.999, 0.9999),
    "add": (lambda x: x + (x.roll(1, -1) * -1.0), 100.0, 101.0),
    "add a negative": (lambda x: torch.add(x, x.roll(1, -1), alpha=-1), 100.0, 101.0),
    "addcmul": (lambda x: torch.addcmul(x, x, x.roll(1, -1), value=-0.01), 100.0, 101.0),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x.roll(1, -1), value=-100.0), 100.0, 101.0),
    "lerp": (lambda x: torch.lerp(x, -x.roll(1, -1), 0.5), 100.0, 101.0),
    "mul": (lambda x: x * x.roll(1, -1), -1.0, 1.0),
    "div": (lambda x: x / x.roll(1, -1), 0.01, 1.0),
    "hypot": (lambda x: torch.hypot(x, x.roll(1, -1)), -1.0, 1.0),
    "atan2": (lambda x: torch.atan2(x, x.roll(1, -1)), 100.0, 101.0),
    "maximum": (lambda x: torch.maximum(x, x.roll(1, -1)), 100.0, 101.0),
    "minimum": (lambda x: torch.minimum(x, x.roll(1, -1)), 100.0, 101.0),
    "logaddexp": (lambda x: torch.logaddexp(x, -x) - 4, 4.0, 4.01),
    "logaddexp2": (lambda x: torch.logaddexp2(x, -x) - 4, 4.0, 4.01),
    "aminmax": (lambda x: torch.aminmax(x, dim=-1)[0], 100.0, 101.0),
    "linalg_vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), 0.01, 1.0),
    "true_divide": (lambda x: torch.true_divide(x, x.roll(1, -1)), 0.01, 1.0),
    "ldexp": (lambda x: torch.ldexp(x, torch.arange(SIZE) % 4), 0.01, 1.0),
    "copysign": (lambda x: torch.copysign(x, -x), 0.01, 1.0),
    "fmax": (lambda x: torch.fmax(x, x.roll(1, -1)), 100.0, 101.0),
    "fmin": (lambda x: torch.fmin(x, x.roll(1, -1)), 100.0, 101.0),
    "igamma": (lambda x: torch.igamma(torch.full_like(x, 3.0), x), 9.0, 12.0),
    "igammac": (lambda x: torch.igammac(torch.full_like(x, 3.0), x), 9.0, 12.0),
    "polygamma": (lambda x: torch.polygamma(2, x), 0.1, 0.2),
    "special_xlog1py": (lambda x: torch.special.xlog1py(x, x), -0.999, -0.99),
    "special_zeta": (lambda x: torch.special.zeta(x.detach(), x.detach()) + 0 * x, 1.01, 1.02),
    "xlogy": (lambda x: torch.xlogy(x, x), 0.999, 1.001),
    "cross": (lambda x: torch.cross(x[:, :3], x[:, 3:6], dim=-1), 100.0, 101.0),
    "where": (lambda x: torch.where(x > 100.5, x, -x), 100.0, 101.0),
    "comparison": (lambda x: (x > x.roll(1, -1)) * 1.0 + 0 * x, 100.0, 101.0),
    "floor_divide": (lambda x: torch.floor_divide(x.detach(), 0.7) + 0 * x, 1000.0, 1100.0),
    "heaviside": (lambda x: torch.heaviside(x.detach() - 100.5, x.detach()) + 0 * x, 100.0, 101.0),
    "glu": (lambda x: F.glu(x), -9.0, -4.0),
    "cdist": (lambda x: torch.cdist(x, x.roll(1, 0)), 100.0, 101.0),
    "cosine_similarity": (lambda x: F.cosine_similarity(x - 100.5, x.roll(1, -1) - 100.5), 100.0, 101.0),
    "mse_loss": (lambda x: F.mse_loss(x, x.roll(1, -1), reduction="none"), 100.0, 101.0),
    "l1_loss": (lambda x: F.l1_loss(x, x.roll(1, -1), reduction="none"), 100.0, 101.0),
    "huber_loss": (lambda x: F.huber_loss(x, x.roll(1, -1), reduction="none"), 100.0, 101.0),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(SIZE) % 5, reduction="none"), 100.0, 110.0),
    "layer_norm of large": (lambda x: F.layer_norm(x, (SIZE,)), 1.0, 9.0),
    "bucketize": (lambda x: torch.bucketize(x, torch.arange(0, 200, 0.1)) * 0.01 + 0 * x, 100.0, 101.0),
    "to integers": (lambda x: (x * 10).long() * 0.1 + 0 * x, 100.0, 101.0),
    "index": (lambda x: torch.arange(0, 2, 0.001)[(x * 10).long()] + 0 * x, 100.0, 101.0),
    "inverse": (lambda x: torch.linalg.inv(x * 0.01 + torch.eye(SIZE)), -1.0, 1.0),
    "fft": (lambda x: torch.fft.rfft(x).abs()[:, 1:], 100.0, 101.0),
}.items()}  # fmt: skip


def _written(x: Tensor) -> Tensor:
    made = torch.zeros(SIZE, SIZE)
    made[:] = x * 1.0
    return made


# Each takes a value there and back: what leads to an argument, and what that starts from.
STEPS = {
    "mul": (lambda x: x * 3.0, lambda x: x / 3.0),
    "div": (lambda x: x / 3.0, lambda x: x * 3.0),
    "neg": (lambda x: -x, lambda x: -x),
    "add": (lambda x: x + 5.0, lambda x: x - 5.0),
    "product": (lambda x: x * torch.linspace(1, 2, SIZE), lambda x: x / torch.linspace(1, 2, SIZE)),
    "difference": (lambda x: x - torch.linspace(1, 2, SIZE), lambda x: x + torch.linspace(1, 2, SIZE)),
    "cat": (lambda x: torch.cat(x.chunk(2, -1), -1), lambda x: x),
    "stack": (lambda x: torch.stack((x, x), 1)[:, 1], lambda x: x),
    "view": (lambda x: x.reshape(2, -1).view(SIZE, SIZE), lambda x: x),
    "transpose": (lambda x: x.t().contiguous(), lambda x: x.t()),
    "flip": (lambda x: x.flip(0), lambda x: x.flip(0)),
    "roll": (lambda x: x.roll(2, 0), lambda x: x.roll(-2, 0)),
    "expand": (lambda x: x[None].expand(2, SIZE, SIZE).contiguous()[1], lambda x: x),
    "pad": (lambda x: F.pad(x, (1, 0))[:, 1:], lambda x: x),
    "index": (lambda x: x[torch.arange(SIZE - 1, -1, -1)], lambda x: x.flip(0)),
    "gather": (lambda x: x.index_select(1, torch.arange(SIZE - 1, -1, -1)), lambda x: x.flip(1)),
    "where": (lambda x: torch.where(torch.ones(SIZE, dtype=torch.bool), x, x), lambda x: x),
    "dropout": (lambda x: F.dropout(x, 0.5, False), lambda x: x),
    "sum": (lambda x: torch.stack((x, x), -1).sum(-1), lambda x: x / 2),
    "mean": (lambda x: torch.stack((x, x), -1).mean(-1), lambda x: x),
    "write": (lambda x: torch.zeros(SIZE, SIZE).copy_(x * 1.0), lambda x: x),
    "set": (_written, lambda x: x),
}


def chain(draw: random.Random) -> tuple[str, ...]:
    """Draw up to four steps."""
    return tuple(draw.choices(list(STEPS), k=draw.randint(0, 4)))


def through(x: Tensor, steps: tuple[str, ...]) -> Tensor:
    """Lead ``x`` through ``steps``."""
    for step in steps:
        x = STEPS[step][0](x)
    return x


def start(argument: Tensor, steps: tuple[str, ...]) -> Tensor:
    """Return what ``steps`` lead to ``argument``."""
    for step in reversed(steps):
        argument = STEPS[step][1](argument)
    return argument.contiguous()
