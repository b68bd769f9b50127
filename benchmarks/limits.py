"""How fast a step could be: an estimate from what this machine multiplies and copies in a second.

Before: a model's name. After: ``Limit.ms``, its products at the rate of a large product, plus the bytes of AdamW and
of saved activations at the rate of a large copy.

An estimate, not a bound: attention is counted in full where it is causal, and products of other shapes run at other
rates; all else that a step does (norms, activations, casts, calls) is left out; and one core may stream its optimizer
state faster than it copies. Every variant of a model is held against the one limit, with autocast's saved activations.
"""

import contextlib
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from devices import Device
from models import case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SIDE, SMALL, SLOW = {"cpu": 2048, "cuda": 8192}, 512, 4.0  # SLOW: seconds of one product
COPIED = 2**28  # bytes: more than caches hold
ADAMW = 28  # bytes a parameter: weight, gradient and two moments are read, all but the gradient written, in fp32


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second: floating-point operations of products by dtype, bytes read and written."""

    gemm: dict[str, float]
    copy: float


@dataclass(frozen=True)
class Limit:
    """The estimate for a model's step, and what it is made of."""

    flops: int
    optimizer_bytes: int
    activation_bytes: int
    gemm: float
    copy: float

    @property
    def ms(self) -> float:
        """Return milliseconds."""
        return 1e3 * (self.flops / self.gemm + (self.optimizer_bytes + self.activation_bytes) / self.copy)

    def to_dict(self) -> dict[str, float]:
        """Return the parts and the sum."""
        return {**asdict(self), "ms": self.ms}


def measured_rates(device: Device, dtypes: dict[str, torch.dtype], rounds: int = 5) -> Rates:
    """Return the median rates of this machine, with as many threads as are set."""
    gemm = {name: _gemm_rate(device, dtype, rounds) for name, dtype in dtypes.items()}
    x = torch.ones(COPIED // 4, device=device.name)
    into = torch.zeros_like(x)
    return Rates(gemm, 2 * COPIED / _seconds(device, lambda: into.copy_(x), rounds))


def _gemm_rate(device: Device, dtype: torch.dtype, rounds: int) -> float:
    """Multiply matrices of 2048 (8192 on a GPU), or of 512 where those would take too long (fp16 on some CPUs)."""
    quick = 2 * SMALL**3 / _seconds(device, _product(device.name, dtype, SMALL), 1)
    side = SIDE[device.name]
    if 2 * side**3 / quick > SLOW:
        return quick
    return 2 * side**3 / _seconds(device, _product(device.name, dtype, side), rounds)


def _product(device: str, dtype: torch.dtype, side: int) -> Callable[[], Tensor]:
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _seconds(device: Device, call: Callable[[], object], rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):
        start = device.clock()
        call()
        found.append(device.clock() - start)
    return statistics.median(found[1:])


def flops_of(name: str, scale: float, training: bool) -> int:
    """Return the floating-point operations of the products in one step of a model, computing nothing.

    Attention and recurrent layers are written out in products for that: torch counts no fused kernels of the CPU.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _without_onednn():
        made = case(name, scale)
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            if training:
                made.loss(made.model, *made.batch).backward()
            else:
                with torch.no_grad():
                    made.infer(made.model.eval(), *made.batch)
    return counted.get_total_flops()


@contextlib.contextmanager
def _without_onednn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TF32, which is left as it is
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def limit_of(name: str, scale: float, training: bool, rates: Rates, saved: int | None) -> Limit:
    """Return the limit of a training step that saves ``saved`` bytes of activations, or of an inference call."""
    with FakeTensorMode():
        made = case(name, scale)
    parameters = sum(p.numel() for p in made.model.parameters())
    times = made.micro_batches if training else 1
    return Limit(
        times * flops_of(name, scale, training),
        ADAMW * parameters if training else 0,
        2 * times * (saved or 0) if training else 0,
        max(rates.gemm.values()),
        rates.copy,
    )
