"""Activations of the user's own by tables: the bits of their two bodies for every number; all else is left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.pointwise import lookup_custom_activations, lookup_table
from amp_graph.passes.backends.cpu.pointwise.lookup_custom_activations import LookupCustomActivations
from tests.measure import saved_bytes
from tests.passes.graphs import Function

pytestmark = [
    pytest.mark.skipif(lookup_table.library() is None, reason="needs a C compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def it_is_always_profitable(monkeypatch):
    monkeypatch.setattr(
        lookup_custom_activations, "table_is_profitable", lambda device, form, elements: device == "cpu"
    )


class Swish(torch.autograd.Function):
    """As in memory-efficient EfficientNets."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Gelu(torch.autograd.Function):
    """As in HF's BLOOM."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)
        return slope * grad


class Clipped(torch.autograd.Function):
    """Its gradient is not its derivative; it computes in fp64 inside."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x.double().clamp(-1, 1) * 8).div(8).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() <= 1).to(grad.dtype)


ACTIVATIONS = {f.__name__: f for f in (Swish, Gelu, Clipped)}


def altered(forward=None, backward=None):
    """Swish with another method."""

    class Altered(torch.autograd.Function):
        pass

    Altered.forward = staticmethod(forward or Swish.forward)
    Altered.backward = staticmethod(backward or Swish.backward)
    return Altered


def of_a_row(ctx, x):
    ctx.save_for_backward(x)
    return x * torch.softmax(x, -1)


def of_neighbours(ctx, x):
    ctx.save_for_backward(x)
    return x * x.roll(1, 0)


def drawn(ctx, x):
    ctx.save_for_backward(x)
    return torch.where(torch.rand_like(x) < 0.5, x, -x)


def saves_the_result(ctx, x):
    made = x * torch.sigmoid(x)
    ctx.save_for_backward(made)
    return made


def of_two_results(ctx, x):
    ctx.save_for_backward(x)
    return x * torch.sigmoid(x), x + 1


def added(ctx, grad):
    return grad + ctx.saved_tensors[0]


def rounded_twice(ctx, grad):
    return grad * torch.sigmoid(ctx.saved_tensors[0]) * 2


def in_fp32(ctx, grad):
    return (grad.float() * ctx.saved_tensors[0].float()).to(grad.dtype)


def summed(ctx, grad):
    return grad * ctx.saved_tensors[0].sum(0, keepdim=True).expand_as(grad)


OTHERS = {
    "of a row": altered(of_a_row),
    "of neighbours": altered(of_neighbours),
    "drawn": altered(drawn),
    "saves its result": altered(saves_the_result),
    "two results": altered(of_two_results, lambda ctx, one, two: one + two),
    "adds to its gradient": altered(None, added),
    "rounds its gradient twice": altered(None, rounded_twice),
    "multiplies in fp32": altered(None, in_fp32),
    "a gradient of sums": altered(None, summed),
}
W = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)) / 4
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def passed(activation, policy="bf16"):
    def function(s, x):
        made = activation.apply(x @ s.w)
        return (made if isinstance(made, torch.Tensor) else sum(made)) @ s.w

    torch.manual_seed(0)
    model = amp_graph.convert(Function(function, w=W.clone()), policy)
    out = model(X)
    out.float().square().sum().backward()
    return [out.detach(), model.w.grad], amp_graph.report(model).graphs[0].text


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_model_has_the_bits_of_its_own_function(name):
    found, text = passed(ACTIVATIONS[name])
    plain, without = passed(ACTIVATIONS[name], "bf16,skip=lookup_custom_activations")
    assert "activated(" in text
    assert "activated(" not in without
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_number_has_the_bits_of_the_function(name):
    form = "custom " + passed(ACTIVATIONS[name])[1].split("'custom ")[1].split("'")[0]
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(BF16)
    theirs = x.clone().requires_grad_()
    wanted = ACTIVATIONS[name].apply(theirs)
    wanted.backward(grad)
    for one, other in (
        (lookup_table.activation_by_table(x, form), wanted),
        (lookup_table.gradient_by_table(grad, x, form), theirs.grad),
    ):
        assert torch.equal(one.nan_to_num(7.0), other.detach().nan_to_num(7.0))


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_alone(name):
    found, text = passed(OTHERS[name])
    plain, without = passed(OTHERS[name], "bf16,skip=lookup_custom_activations")
    assert text == without
    assert all(map(torch.equal, found, plain))


def test_control_a_gradient_that_is_no_product_would_be_wrong(monkeypatch):
    monkeypatch.setattr(lookup_custom_activations, "_is_slope_times_gradient", lambda body, dtype: True)
    found, _ = passed(OTHERS["adds to its gradient"])
    plain, _ = passed(OTHERS["adds to its gradient"], "bf16,skip=lookup_custom_activations")
    assert not torch.equal(found[1], plain[1])


def test_functions_that_compute_the_same_share_a_table():
    texts = [passed(f)[1] for f in (Swish, altered(), Gelu)]
    forms = [text.split("'custom ")[1].split("'")[0] for text in texts]
    assert forms[0] == forms[1] != forms[2]


class Own(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.activation.apply(x)


def factor(number):
    @torch._dynamo.allow_in_graph
    def scaled(x):
        return x * number

    return scaled


def test_functions_of_one_name_are_not_one():
    outs = []
    for scaled in (factor(2.0), factor(3.0)):
        found, _ = passed(altered(lambda ctx, x, f=scaled: (ctx.save_for_backward(x), f(x).sigmoid())[1]))
        outs.append(found[0])
    assert not torch.equal(*outs)


def net(activation):
    torch.manual_seed(0)
    images = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Own(activation), nn.Conv2d(8, 8, 3), Own(activation)
    return nn.Sequential(*images, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.multiplied  # elsewhere images stay as they are
def test_images_stay_in_channels_last():
    loop, x = amp_graph.convert(net(Swish)), torch.randn(4, 3, 12, 12)
    loop(x).sum().backward()
    text = amp_graph.report(loop).graphs[0].text
    assert "channels_last" in text
    assert "contiguous_format" not in text


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_step_whose_functions_compute_in_fp32_has_the_same_bits(name):
    losses = {}
    for policy in ("bf16", "bf16,skip=lookup_custom_activations"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 16), Own(ACTIVATIONS[name]), nn.Linear(16, 16), Own(Swish), nn.Linear(16, 4)
        )
        step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.5), policy)
        losses[policy] = [step(X, X[:, :4]).item() for _ in range(4)]
        assert ("activated(" in step_text(step)) is (policy == "bf16")
    assert len({tuple(found) for found in losses.values()}) == 1
    assert len(set(losses["bf16"])) == 4


def step_text(step):
    return str([graph.text for graph in amp_graph.report(step).graphs])


def test_only_its_input_is_saved():
    saved = {}
    for policy in ("bf16", "bf16,skip=lookup_custom_activations"):
        model = amp_graph.convert(nn.Sequential(nn.Linear(16, 256), Own(Swish), nn.Linear(256, 16)), policy)
        model(X)
        saved[policy] = saved_bytes(lambda model=model: model(X), model, weight_copies=False)
    assert len(set(saved.values())) == 1


def test_second_derivatives_are_those_of_the_function():
    model = nn.Sequential(nn.Linear(16, 16), Own(Swish))

    def twice(model):
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    wanted = twice(model)
    found = twice(amp_graph.convert(model))
    assert (found - wanted).norm() <= 0.03 * wanted.norm()


def test_graphs_for_compilers_are_left_alone():
    policy = amp_graph.policy.Policy.parse("bf16")
    from tests.passes.graphs import passes_for

    assert any(isinstance(one, LookupCustomActivations) for one in passes_for(policy, "cpu", eager=True))
    assert not any(isinstance(one, LookupCustomActivations) for one in passes_for(policy, "cpu"))
