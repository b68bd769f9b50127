"""Norms that accuracy=fast lowers on CUDA: activations and parameters in one dtype, as torch's kernels want them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_graph import Policy
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import IdentifyOps, names_of
from amp_graph.passes.graph.meta_keys import MARK
from tests.layers import forward_of, layers
from tests.passes.graphs import capture, errors_of, passes_for, run_step

X = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(3))
LOW, FULL = "bfloat16", "float32"
FAST = "bf16,accuracy=fast"


def drawn_norms(norm, count=3):
    norms = nn.ModuleList(norm() for _ in range(count))
    for p in norms.parameters():
        p.data.add_(torch.randn_like(p) / 3)
    return norms


@layers(
    lambda norm: dict(
        first=nn.Linear(32, 32),
        head=nn.Linear(32, 32),
        blocks=nn.ModuleList(nn.Linear(32, 32) for _ in range(3)),
        norms=drawn_norms(norm),
    ),
    seed=0,
)
def Stream(self, x):
    """Two blocks with norms before their linears, and a norm and a head behind; norms of any kind."""
    x = self.first(x)
    for norm, block in zip(self.norms[:2], self.blocks, strict=False):
        x = x + F.gelu(block(norm(x)))
    return self.head(self.norms[2](x))


@layers(lambda norm: dict(first=nn.Conv2d(4, 8, 3), norm=norm(), last=nn.Conv2d(8, 4, 3)), seed=0)
def Images(self, x):
    return self.last(F.relu(self.norm(self.first(x))))


@forward_of(Stream)
def LastNorm(self, x):
    return self.norms[0](self.first(x))


layer_norm, rms_norm = partial(nn.LayerNorm, 32), partial(nn.RMSNorm, 32)


def planned(model, policy, x=X):
    return (graph := capture(model, x)).through(passes_for(Policy.parse(policy), "cuda", eager=True))[0], graph.given


def norms(gm):
    return [n for n in gm.graph.nodes if any(name.endswith("_norm") for name in names_of(n) or ())]


def dtypes(gm):
    """Return for each norm the dtypes of its input and its parameters, and its result's."""
    return [tuple(str(value(n).dtype)[6:] for n in (*norm.all_input_nodes, norm)) for norm in norms(gm)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "low"), [(FAST, LOW), ("fp16,accuracy=fast", "float16")])
@pytest.mark.parametrize(("norm", "values"), [(layer_norm, 4), (rms_norm, 3)])
def test_norms_are_low_and_mix_no_dtypes(norm, values, policy, low):
    assert dtypes(planned(Stream(norm), policy)[0]) == [(low,) * values] * 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,accuracy=1.5", f"{FAST},keep_fp32=norms.*"])
@pytest.mark.parametrize(("norm", "values"), [(layer_norm, 4), (rms_norm, 3)])
def test_other_accuracies_and_the_users_words_round_no_parameter(norm, values, policy):
    assert dtypes(planned(Stream(norm), policy)[0]) == [(FULL,) * values] * 3


def test_the_last_norm_is_not_rounded():
    assert dtypes(planned(LastNorm(layer_norm), FAST)[0]) == [(FULL,) * 4]


def test_group_norms_stay_full_and_batch_norms_keep_their_parameters():
    x = torch.randn(2, 4, 9, 9)
    group, _ = planned(Images(lambda: nn.GroupNorm(2, 8)), FAST, x)
    assert dtypes(group) == [(FULL,) * 4]
    assert "saves mean and deviation in the dtype of the activations" in norms(group)[0].meta[MARK].reason
    batch, _ = planned(Images(lambda: nn.BatchNorm2d(8)), FAST, x)
    assert [(found[0], found[-1], set(found[1:-1])) for found in dtypes(batch)] == [(LOW, LOW, {FULL})]


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_the_plan_says_why(norm):
    gm, _ = planned(Stream(norm), FAST)
    for found in norms(gm):
        assert "rounded for it" in found.meta[MARK].reason
        assert found.meta[MARK].origin.startswith("fast_cuda.toml:")


# -- numbers -------------------------------------------------------------------------------------------------------


def as_on_cuda(gm):
    """Let norms compute as CUDA's kernels do, fp32 inside: the CPU's loses gradients of low-precision parameters."""
    assert norms(gm)
    for node in norms(gm):
        torchs = node.target

        def norm(x, shape, *rest, torchs=torchs, **named):
            wide = [t.float() if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 else t for t in (x, *rest)]
            return torchs(wide[0], shape, *wide[1:], **named).to(x.dtype)

        node.target = norm
    gm.recompile()
    return gm


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_errors_are_at_most_what_fast_documents(norm):
    """Against ``torch.autocast``'s, whose norms are fp32 on CUDA, and those of a model held in bf16."""
    fast, given = planned(Stream(norm), FAST)
    default, _ = planned(Stream(norm), "bf16")
    exact = run_step(capture(Stream(norm).double(), X.double()).gm, [g.double() for g in given])
    held = capture(Stream(norm).bfloat16(), X.bfloat16())
    ours, autocasts = (errors_of(run_step(as_on_cuda(gm), given), exact) for gm in (fast, default))
    low = errors_of(run_step(as_on_cuda(held.through([IdentifyOps()])[0]), [g.bfloat16() for g in given]), exact)
    assert all(a <= 2.2 * b for a, b in zip(ours, autocasts, strict=True))
    assert sum(ours) <= sum(low)
