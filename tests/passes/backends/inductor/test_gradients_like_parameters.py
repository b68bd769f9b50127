"""Through Inductor, autograd takes the gradient of every parameter as the compiled backward returns it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.inductor.gradients_like_parameters import GiveGradientsParameterStrides, laid

pytestmark = [  # what importing Inductor says, by torch 2.11 to 2.13
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*jit.script_method:DeprecationWarning"),
]
SKIP = f",skip={GiveGradientsParameterStrides.name}"
X = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))
LAST = X.contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.short = nn.BatchNorm2d(16), nn.Conv2d(8, 16, 1)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.short(x)).mean((2, 3))


class Tied(nn.Module):
    """One weight that two convolutions read, and another operation in full precision."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = F.conv2d(F.relu(self.conv(x)), self.conv.weight, padding=1)
        return h.mean((2, 3)) + self.conv.weight.exp().sum()


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(8, 8, 3, padding=1)

    def forward(self, x):
        x = x.unsqueeze(2).expand(-1, -1, 4, -1, -1).contiguous(memory_format=torch.channels_last_3d)
        return self.conv(x).mean((2, 3, 4))


class Across(nn.Module):
    """A convolution whose weight is a parameter in an order of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 3, 12).permute(3, 1, 0, 2) / 8)

    def forward(self, x):
        return F.conv2d(x, self.weight).mean((2, 3))


def channels_last():
    return Residual().to(memory_format=torch.channels_last)


NETS = [Residual, Tied, Volumes, Across, lambda: nn.ConvTranspose2d(8, 6, 2, stride=2), channels_last]
NAMES = ["residual", "tied", "volumes", "a layout of its own", "transposed", "channels_last parameters"]


def given(model):
    """Return the strides and addresses of gradients as the compiled backward returns them, by name."""
    found = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: found.__setitem__(name, (grad.stride(), grad.data_ptr())))
    return found


def trained(build, policy, x, steps=2):
    """Return the names of the parameters whose gradients autograd copied, and all gradients."""
    torch.manual_seed(0)
    model = amp_graph.convert(build(), policy, compile="inductor")
    found = given(model)
    for _ in range(steps):
        model.zero_grad()
        model(x).square().sum().backward()
    copied = {name for name, p in model.named_parameters() if p.grad.data_ptr() != found[name][1]}
    return copied, {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def without_code(monkeypatch):
    """Let AOTAutograd trace both graphs, and run them as they are instead of generating code."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def as_it_is(gm, inputs):
        return make_boxed_func(gm.forward)

    run = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)
    monkeypatch.setattr("amp_graph.capture.dynamo_backend.compile_with_inductor", lambda gm, i, **_: run(gm, i))


@pytest.mark.parametrize(("policy", "x"), [("bf16,device=cuda", X), ("fp16", LAST)])
@pytest.mark.parametrize("build", NETS, ids=NAMES)
def test_no_gradient_is_copied_again_and_no_bit_changes(build, policy, x, without_code):
    copied, grads = trained(build, policy, x)
    assert not copied
    _, plain = trained(build, policy + SKIP, x)
    torch.manual_seed(0)
    for name, p in build().named_parameters():
        assert torch.equal(grads[name], plain[name])
        sizes = [i for i, size in enumerate(p.shape) if size > 1]
        assert [grads[name].stride(i) for i in sizes] == [p.stride(i) for i in sizes]


def test_without_the_pass_gradients_are_copied(without_code):
    assert trained(Residual, "bf16" + SKIP, LAST)[0] == {"first.weight", "second.weight"}


@pytest.mark.slow
def test_through_inductor_itself():
    copied, grads = trained(Residual, "bf16", LAST)
    assert not copied
    torch.manual_seed(0)
    model = Residual()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(LAST).float()
    out.square().sum().backward()
    for name, p in model.named_parameters():
        assert (grads[name] - p.grad).norm() <= 3e-2 * p.grad.norm() + 1e-4


def changes(build, policy="bf16", x=LAST, **how):
    """Return the functions of the graph that the compiler gets."""
    seen = []

    def compiled(gm, inputs, **_):
        seen.append([getattr(n.target, "__name__", "") for n in gm.graph.nodes])
        return gm.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_graph.capture.dynamo_backend.compile_with_inductor", compiled)
        patch.setattr("torch._dynamo.lookup_backend", lambda name: compiled)
        amp_graph.convert(build(), policy, **{"compile": "inductor", **how})(x)
    return seen[0].count("gradient_like")


class Writes(Residual):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.mul_(1.0)
        return super().forward(x)


def test_where_nothing_is_inserted():
    assert changes(Residual) == 3
    assert changes(lambda: Residual().requires_grad_(False)) == 0
    assert changes(Residual, compile="aot_eager") == 0
    assert changes(Residual, "bf16,lists=autocast_cpu") == 0
    assert changes(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))) == 0
    assert changes(Writes) == 2  # one is written to
    with torch.no_grad():
        assert changes(Residual) == 0


def test_accumulated_gradients(without_code):
    """A second backward adds to the first, in place."""
    torch.manual_seed(0)
    model = amp_graph.convert(Residual(), "bf16", compile="inductor")
    model(LAST).sum().backward()
    once = {name: (p.grad.data_ptr(), p.grad.clone()) for name, p in model.named_parameters()}
    model(LAST).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad.data_ptr() == once[name][0]
        assert torch.allclose(p.grad, 2 * once[name][1], rtol=1e-2, atol=1e-3)


def test_a_training_step_has_no_such_gradients(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "amp_graph.capture.dynamo_backend.compile_with_inductor", lambda gm, i, **_: seen.append(gm) or gm.forward
    )
    model = Residual()
    step = amp_graph.TrainStep(model, torch.sum, torch.optim.SGD(model.parameters()), "bf16", compile="inductor")
    step(LAST)
    names = {getattr(n.target, "__name__", "") for n in step.captured[0].rewritten.gm.graph.nodes}
    assert "gradient_like" not in names


def test_laid():
    grad = torch.randn(4, 6, 3, 5).to(memory_format=torch.channels_last)
    for strides in (
        torch.empty(4, 6, 3, 5).stride(),
        grad.stride(),
        torch.empty(5, 4, 3, 6).permute(1, 3, 2, 0).stride(),
    ):
        found = laid(grad, tuple(strides))
        assert torch.equal(found, grad)
        assert found.stride() == tuple(strides)
    assert laid(grad, grad.stride()) is grad
