"""Masks and biases of every kind x forms of attention x policies x lengths: at most 1.5 times autocast's error, or 3 %.

The exact result is that of the formula in fp32: the gradients of torch's attention are others on a CPU where a row sees
nothing. Where autocast's result is NaN, 3 % is the bound. What a user's own lists name runs in the precision that they
name under autocast as well (``OwnLists``).
"""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import amp_graph
from amp_graph.passes.backends.cpu.attention import attention_kernel
from amp_graph.passes.casts.saturation import within_range
from amp_graph.passes.graph import call_arguments
from tests.layers import layers
from tests.relative_error import errors

HEADS, WIDTH, BATCH = 2, 16, 3
SCALE = (WIDTH // HEADS) ** -0.5
LEAST = {"min32": torch.finfo(torch.float32).min, "min_bf16": torch.finfo(torch.bfloat16).min}
LEAST |= {"min_fp16": torch.finfo(torch.float16).min, "-1e4": -1e4, "-1e9": -1e9, "inf": -math.inf}
POLICIES = (
    "bf16", "fp16", "bf16,accuracy=fast", "bf16,accuracy=1.0", "bf16,emulate=cuda", "fp16,emulate=cuda", "bf16-O2",
    "fp16-O2", "bf16,allow=softmax", "fp16,allow=add|softmax", "bf16,allow=add",
    "bf16,deny=softmax|scaled_dot_product_attention",
)  # fmt: skip
LISTS = ("allow=", "deny=")


def seen(length):
    """Return what is seen in three texts: one without padding, one padded on the left, and one on the right."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    place, third = torch.arange(length), length // 3
    return torch.stack([causal, causal & (place >= third), causal & (place < length - third)])[:, None]


def hidden(length, number):
    there = seen(length)
    if number == -math.inf:  # a row that sees nothing would be NaN in fp32 as well
        there = there | torch.eye(length, dtype=torch.bool)
    return torch.zeros(BATCH, 1, length, length).masked_fill(~there, number)


def alibi(length, *, relative):
    place = torch.arange(length, dtype=torch.float32)
    slopes = torch.tensor([0.5, 0.0625]).view(1, HEADS, 1, 1)
    return slopes * (place - place[:, None] if relative else place)


def random_bias(length):
    return torch.randn(1, HEADS, length, length, generator=torch.Generator().manual_seed(7))


MASKS = {name: (lambda n, number=number: hidden(n, number)) for name, number in LEAST.items()}
MASKS |= {
    "alibi_relative": lambda n: alibi(n, relative=True) + hidden(n, LEAST["min32"]),
    "alibi_absolute": lambda n: alibi(n, relative=False) + hidden(n, LEAST["min32"]),
    "t5": lambda n: 4 * random_bias(n) + hidden(n, LEAST["min32"]),
    "swin": lambda n: random_bias(n) + hidden(n, -100.0),
}


def added(q, k, v, m):
    return (q @ k.mT * SCALE + m).softmax(-1) @ v


def added_in_fp32(q, k, v, m):
    return F.softmax(m + q @ k.transpose(2, 3) / SCALE**-1, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def in_place(q, k, v, m):
    scores = torch.matmul(q * SCALE, k.mT)
    scores += m
    return scores.softmax(-1) @ v


def folded(q, k, v, m):
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    bias = m.expand(len(m), HEADS, -1, -1).reshape(-1, *m.shape[2:]).to(q.dtype)
    return torch.bmm(torch.baddbmm(bias, q, k.mT, alpha=SCALE).softmax(-1), v).unflatten(0, (-1, HEADS))


def bart(q, k, v, m):
    q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q * SCALE, k, v))
    scores = torch.bmm(q, k.mT).view(-1, HEADS, *q.shape[1:2], k.shape[1]) + m
    return torch.bmm(scores.view(*q.shape[:2], -1).softmax(-1), v).unflatten(0, (-1, HEADS))


def with_chances(q, k, v, m):
    chances = (q @ k.mT * SCALE + m).softmax(-1)
    return chances @ v + 0.01 * chances.amax(-1, keepdim=True)


def called(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


def filled(q, k, v, m):
    return (q @ k.mT * SCALE).masked_fill(m < -50, torch.finfo(q.dtype).min).softmax(-1) @ v


def chosen(q, k, v, m):
    return torch.where(m > -50, q @ k.mT * SCALE, torch.finfo(q.dtype).min).softmax(-1) @ v


FORMS = (added, added_in_fp32, in_place, folded, bart, with_chances, called, filled, chosen)
BOOLEAN = (filled, chosen)
CASES = [(form, name) for form in FORMS for name in MASKS if form not in BOOLEAN or name == "min32"]


@layers(lambda form: dict(projected=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH), form=form), seed=0)
def Attends(self, x, mask):
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.projected(x).chunk(3, -1))
    return self.out(self.form(q, k, v, mask).transpose(1, 2).flatten(2))


class OwnLists(TorchFunctionMode):
    """Runs the operations that a policy's ``allow=`` and ``deny=`` name in the precision that they name.

    What they read is clamped to the range of that precision, and so are masks that the formula itself converts: a
    softmax that a list makes low rounds absolute positions in every formula, and that is what the list asks for.
    """

    def __init__(self, policy, low):
        super().__init__()
        words = dict(word.split("=") for word in policy.split(",") if "=" in word)
        self.low, self.lists = low, {key: words.get(key, "").split("|") for key in ("allow", "deny")}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__.strip("_").removeprefix("i")
        dtype = self.low if name in self.lists["allow"] else torch.float32 if name in self.lists["deny"] else None
        if name == "to":
            args = (within_range(args[0], args[1]), *args[1:])
        if dtype is None or "dtype" in (kwargs or {}):
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return func(*(within_range(t.float(), dtype).to(dtype) if torch.is_tensor(t) else t for t in args))


def trained(form, mask, policy=""):
    """Return the result, and the gradients of the input and of the parameters."""
    model = Attends(form)
    x = torch.randn(len(mask), mask.shape[-1], WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*scales losses")
        if policy and not policy.startswith("autocast"):
            model = amp_graph.convert(model, policy)
        low = torch.float16 if "fp16" in policy else torch.bfloat16
        eager = policy.startswith("autocast")
        lists = OwnLists(policy, low) if eager and "=" in policy else nullcontext()
        with torch.autocast("cpu", low, enabled=eager), lists:
            made = model(x, mask)
        scale = 64 if x.shape[1] < 1000 else 8  # 64 takes fp32's own gradients of 2,000 tokens out of fp16's range
        made.float().square().sum().mul(scale).backward()
    return [made.detach(), x.grad, *(p.grad for p in model.parameters())]


def compared(form, name, length, policies=POLICIES):
    """Return by policy its worst error, and the worst of autocast."""
    mask = MASKS[name](length)
    mask = mask[1:2] if length > 1000 else mask  # one text suffices, and takes a third of the time
    exact = trained(added if form is called else form, mask)

    def worst(policy):
        found = trained(form, mask, policy)
        return max(math.inf if math.isnan(e) else e for e in errors(found, exact))

    same = {p: f"autocast {p[:4]}" + ("," + p[5:] if p[5:].startswith(LISTS) else "") for p in policies}
    autocast = {name: worst(name) for name in {*same.values()}}
    return {policy: (worst(policy), autocast[name]) for policy, name in same.items()}


@pytest.mark.sampled(80)
@pytest.mark.parametrize("length", [12, 130, 2000])
@pytest.mark.parametrize(("form", "name"), CASES, ids=[f"{form.__name__}-{name.strip('-')}" for form, name in CASES])
def test_masks_survive_as_they_do_under_autocast(form, name, length):
    found = compared(form, name, length)
    assert {p: e for p, e in found.items() if e[0] > max(1.5 * e[1] if e[1] < math.inf else 0.0, 0.03)} == {}


@pytest.mark.skipif(attention_kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")
def test_control_a_mask_that_is_rounded_is_found(monkeypatch):
    kernels = attention_kernel._mask_of
    monkeypatch.setattr(attention_kernel, "_mask_of", lambda mask: kernels(mask.bfloat16()))
    with pytest.raises(AssertionError):
        test_masks_survive_as_they_do_under_autocast(added, "alibi_absolute", 130)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize(("name", "length"), [("min32", 12), ("min32", 130), ("-1e9", 130), ("alibi_absolute", 130)])
def test_calls_have_the_gradients_of_the_formula(name, length, policy, own, monkeypatch):
    if not own:
        monkeypatch.setattr(call_arguments, "cpu_has_bf16", lambda: False)
    mask = MASKS[name](length)
    assert max(errors(trained(called, mask, policy), trained(added, mask))) < (0.01 if policy == "bf16" else 0.001)


def test_control_torchs_fused_backward_has_others():
    mask = MASKS["min32"](130)
    assert max(errors(trained(called, mask), trained(added, mask))) > 0.1


MADE = {
    "all": lambda n, dtype: torch.full((n, n), torch.finfo(dtype).min, dtype=dtype),
    "causal": lambda n, dtype: torch.full((n, n), torch.finfo(dtype).min, dtype=dtype).triu(1),
    "filled": lambda n, dtype: torch.zeros(n, n, dtype=dtype).fill_(torch.finfo(dtype).min),
    "times": lambda n, dtype: torch.ones(n, n, dtype=dtype) * torch.finfo(dtype).min,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp16,emulate=cuda"])
@pytest.mark.parametrize("made", MADE)
def test_the_lowest_number_of_the_dtype_at_hand_stays_finite(made, policy):
    def inside(attention):
        return lambda q, k, v, _: attention(q, k, v, MADE[made](q.shape[-2], q.dtype))

    mask = torch.zeros(BATCH, 1, 12, 12)
    exact, found = trained(inside(added), mask), trained(inside(called), mask, policy)
    autocast = trained(inside(called), mask, f"autocast {policy[:4]}")  # whose lowest number is that of its own dtype
    assert all(t.isfinite().all() for t in found)
    assert errors(found, exact)[0] < max(0.01, 1.5 * errors(autocast, exact)[0])
