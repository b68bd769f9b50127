"""The share of lost updates is that of a count in float64, and looking at it changes nothing of the optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_graph.audit.session import Audit
from amp_graph.audit.updates import Lost, lost_changes
from tests.layers import layers

STEPS = 3


@layers(
    lambda: dict(
        norm=nn.LayerNorm(24),
        enter=nn.Linear(24, 48),
        gate=nn.Linear(24, 48),
        scale=nn.Parameter(torch.tensor(1.0)),
        leave=nn.Linear(48, 3),
    )
)
def Gated(self, x):
    """Matrices of several shapes, a scalar and a norm."""
    x = self.norm(x)
    return self.leave(self.enter(x) * torch.sigmoid(self.gate(x)) * self.scale)


def mlp():
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))


def cnn():
    layers = nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 8)), layer, nn.Flatten(), nn.Linear(24, 3))


def large():
    return nn.Sequential(nn.Linear(24, 20_000), nn.Tanh(), nn.Linear(20_000, 3))  # 480,000 elements: sampled


MODELS = [
    (mlp, torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=3e-4)),
    (cnn, torch.float16, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    (Gated, torch.bfloat16, lambda p: torch.optim.Adam(p, lr=1e-4, amsgrad=True, foreach=True)),
    (attention, torch.bfloat16, lambda p: torch.optim.Adafactor(p, lr=1e-3, eps=(1e-6, 1e-3))),
    (large, torch.bfloat16, lambda p: torch.optim.RMSprop(p, lr=1e-5, momentum=0.5)),
]


def counted_in_fp64(optimizer):
    """Return the changes of a step, and the lost ones, of a copy of the whole optimizer in float64."""
    exact = copy.deepcopy(optimizer)
    low = [p for group in optimizer.param_groups for p in group["params"]]
    for group, real in zip(exact.param_groups, optimizer.param_groups, strict=True):
        for number, p in enumerate(real["params"]):
            wide = p.detach().double()
            wide.grad = p.grad.double()
            state = optimizer.state[p]
            exact.state[wide] = {
                name: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() and name != "step" else v
                for name, v in copy.deepcopy(state).items()
            }
            group["params"][number] = wide
    exact.step()
    new = [p for group in exact.param_groups for p in group["params"]]
    pairs = [(p.detach(), wide) for p, wide in zip(low, new, strict=True)]
    moves = sum(int((wide != p.double()).sum()) for p, wide in pairs)
    lost = sum(int(((wide != p.double()) & (wide.to(p.dtype) == p)).sum()) for p, wide in pairs)
    return moves, lost


def trained(model, dtype, optimizer, look=lambda optimizer: None, *, by_closures=False):
    """Train, and call ``look`` before each update but the first; return the weights."""
    torch.manual_seed(0)
    model = model().to(dtype)
    optimizer = optimizer(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        return loss

    for step in range(STEPS):
        x, y = torch.randn(32, 24), torch.randint(3, (32,))
        if by_closures:
            optimizer.step(closure)
        else:
            closure()
            look(optimizer) if step else None
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("model", "dtype", "optimizer"), MODELS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_the_share_of_lost_updates_is_within_a_point_of_a_count_in_fp64(model, dtype, optimizer):
    counts = []
    plain = trained(model, dtype, optimizer, lambda o: counts.append(counted_in_fp64(o)))
    with Audit(looks=range(2, STEPS + 1)) as audit:
        audited = trained(model, dtype, optimizer)
    moves, lost = map(sum, zip(*counts, strict=True))
    finding = next(f for f in audit.report().findings if f.code == "AMP301")
    assert not audit.training.unseen
    assert not finding.evidence["estimated_as"]
    assert 0.05 < lost / moves < 0.99
    assert finding.evidence["share"] == pytest.approx(lost / moves, abs=0.01)
    assert all(map(torch.equal, plain, audited))


def codes_of(optimizer):
    """Return the findings of a small bfloat16 training, by their codes."""
    with Audit() as audit:
        trained(mlp, torch.bfloat16, optimizer)
    return {f.code: f for f in audit.report().findings}


def test_no_hook_sees_the_copy_of_an_optimizer():
    seen = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(id(optimizer)))
    try:
        assert "AMP301" in codes_of(lambda p: torch.optim.SGD(p, lr=1e-4))
    finally:
        hook.remove()
    assert len(seen) == STEPS
    assert len(set(seen)) == 1


class Below(torch.optim.SGD):
    """Its step is that of another class, and more."""

    def step(self, closure=None):
        self.buffers = []
        return super().step(closure)


def test_an_optimizer_that_cannot_be_copied_is_estimated_from_what_stays():
    found = codes_of(lambda p: Below(p, lr=1e-4))["AMP301"]
    assert "estimated" in found.text
    exact = codes_of(lambda p: torch.optim.SGD(p, lr=1e-4))["AMP301"]
    assert found.evidence["share"] == pytest.approx(exact.evidence["share"], abs=0.02)


class Masters(torch.optim.Optimizer):
    """Keeps its parameters in float32 itself."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            wide = self.state[p].setdefault("wide", p.float())
            wide -= self.param_groups[0]["lr"] * p.grad.float()
            p.copy_(wide)


def test_masters_in_the_state_of_an_optimizer_lose_nothing():
    assert not {"AMP301", "AMP302", "AMP304"} & set(codes_of(lambda p: Masters(p, lr=1e-4)))


def test_the_factor_is_that_with_which_half_of_the_lost_updates_would_be_kept():
    weights = torch.linspace(0.5, 2.0, 1000).bfloat16()
    update = torch.full((1000,), 1e-4)
    lost = Lost()
    lost.add(lost_changes(weights, weights.float() + update).tolist())
    assert lost.share == 1.0
    kept = (weights.float() + lost.factor() * update).bfloat16() != weights
    less = (weights.float() + 0.7 * lost.factor() * update).bfloat16() != weights
    assert less.float().mean() < 0.5 <= kept.float().mean()


def test_updates_with_a_closure_are_those_without():
    asked = mlp, torch.bfloat16, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)
    shares = []
    for by_closures in (False, True):
        with Audit() as audit:
            trained(*asked, by_closures=by_closures)
        shares.append(next(f for f in audit.report().findings if f.code == "AMP301").evidence["share"])
    assert shares[0] == shares[1]


# -- averages -------------------------------------------------------------------------------------------------

KEPT = 0.999


def each(write):
    """Return the update of an average by ``write(mean, p)`` of each parameter."""

    @torch.no_grad()
    def update(means, parameters):
        for mean, p in zip(means, parameters, strict=True):
            write(mean, p)

    return update


def of_data(means, parameters):
    for mean, p in zip(means, parameters, strict=True):
        mean.data.mul_(KEPT).add_(p.data, alpha=1 - KEPT)


@torch.no_grad()
def of_lists(means, parameters):
    differences = torch._foreach_sub(means, [p.to(mean.dtype) for p, mean in zip(parameters, means, strict=True)])
    torch._foreach_sub_(means, differences, alpha=1 - KEPT)


@torch.no_grad()
def of_decayed_lists(means, parameters):
    torch._foreach_mul_(means, KEPT)
    torch._foreach_add_(means, [p.to(mean.dtype) for p, mean in zip(parameters, means, strict=True)], alpha=1 - KEPT)


def of_a_module(means, parameters):
    class Mean(nn.Module):
        def forward(self):
            each(lambda mean, p: mean.sub_((1 - KEPT) * (mean - p)))(means, parameters)

    Mean()()


AVERAGES = {
    "lerp_": each(lambda mean, p: mean.lerp_(p.to(mean.dtype), 1 - KEPT)),
    "mul_ and add_": each(lambda mean, p: mean.mul_(KEPT).add_(p, alpha=1 - KEPT)),
    "copy_": each(lambda mean, p: mean.copy_(KEPT * mean + (1 - KEPT) * p)),
    "copy_ of float32": each(lambda mean, p: mean.copy_(torch.lerp(mean.float(), p, 1 - KEPT))),
    "sub_": each(lambda mean, p: mean.sub_((1 - KEPT) * (mean - p))),
    "addcmul_": each(lambda mean, p: mean.addcmul_(p - mean, torch.full_like(mean, 1 - KEPT))),
    "a tensor decays": each(lambda mean, p: mean.mul_(torch.tensor(KEPT)).add_(p * (1 - torch.tensor(KEPT)))),
    "data": of_data,
    "lists": of_lists,
    "decayed lists": of_decayed_lists,
    "module": of_a_module,
}
NONE = {
    "a copy": each(lambda mean, p: mean.copy_(p)),
    "a sum": each(lambda mean, p: mean.add_(p, alpha=1e-4)),
    "a decay": each(lambda mean, p: mean.mul_(0.9999)),
    "a product": each(lambda mean, p: mean.mul_(1 + 1e-4 * p)),
}


def average_of(update, dtype):
    """Return the finding of an average in ``dtype``, if there is one, and the share that a count in float64 has."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    means, counts = [(p.detach() * 1.01).to(dtype) for p in model.parameters()], []
    with Audit(looks=(2, 3, 4)) as audit:
        for _ in range(4):
            model(torch.randn(8, 24)).square().mean().backward()
            optimizer.step()
            before = [mean.clone() for mean in means]
            update(means, list(model.parameters()))
            wide = [KEPT * old.double() + (1 - KEPT) * p.detach().double()
                    for old, p in zip(before, model.parameters(), strict=True)]  # fmt: skip
            moves = [new != old for new, old in zip(wide, before, strict=True)]
            stays = [(old == new) & moved for old, new, moved in zip(before, means, moves, strict=True)]
            counts.append((sum(int(m.sum()) for m in moves), sum(int(one.sum()) for one in stays)))
    assert not [one for one in audit.report().unseen if "Averages" in one]
    moved, stayed = map(sum, zip(*counts[1:], strict=True))
    return next((f for f in audit.report().findings if f.code == "AMP303"), None), stayed / max(1, moved)


@pytest.mark.parametrize("form", AVERAGES)
def test_an_average_that_loses_its_updates_is_found_in_any_form(form):
    finding, share = average_of(AVERAGES[form], torch.bfloat16)
    assert share > 0.5
    assert finding.evidence["share"] == pytest.approx(share, abs=0.01)
    assert average_of(AVERAGES[form], torch.float32)[0] is None


@pytest.mark.parametrize("form", NONE)
def test_what_is_written_with_other_weights_is_no_average(form):
    assert average_of(NONE[form], torch.bfloat16)[0] is None


@pytest.mark.parametrize("average", [swa_utils.get_ema_multi_avg_fn, swa_utils.get_ema_avg_fn])
def test_the_averaged_model_of_torch_is_seen(average):
    model = mlp().bfloat16()
    name = "multi_avg_fn" if "multi" in average.__name__ else "avg_fn"
    mean = swa_utils.AveragedModel(model, **{name: average(KEPT)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit() as audit:
        for _ in range(4):
            model(torch.randn(8, 24).bfloat16()).square().mean().backward()
            optimizer.step()
            mean.update_parameters(model)
    (finding,) = (f for f in audit.report().findings if f.code == "AMP303")
    assert finding.evidence["share"] > 0.9
