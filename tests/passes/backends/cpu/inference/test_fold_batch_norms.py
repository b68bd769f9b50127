"""Batch norms folded into convolutions: as exact as before, never stale, and only in evaluation without gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.inference import fold_batch_norms, folded_conv
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from tests.layers import layers

pytestmark = [
    pytest.mark.skipif(not multiplies_bf16(), reason="nothing is folded on a CPU that does not multiply bf16"),
    pytest.mark.filterwarnings("ignore:amp_graph. weights of the frozen"),
]
OFF = "bf16,skip=fold_batch_norms"
X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@layers(
    lambda in_place=True: dict(
        stem=nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        norm0=nn.BatchNorm2d(8),
        conv1=nn.Conv2d(8, 16, 1, groups=4),
        norm1=nn.BatchNorm2d(16),
        conv2=nn.Conv2d(16, 8, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(8, affine=False),
        conv3=nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        norm3=nn.BatchNorm2d(8),
        in_place=in_place,
    )
)
def Block(self, x):
    """A residual block with every form: relu in place or not, sums in place or not, bias, groups, a norm alone."""
    x = F.relu(self.norm0(self.stem(x)), inplace=self.in_place)
    h = torch.relu(self.norm1(self.conv1(x)))
    h = self.norm2(self.conv2(h))
    if self.in_place:
        h += x
        h = h.relu_()
    else:
        h = torch.relu(x + h)
    return self.norm3(self.conv3(h)).mean((2, 3))


def statistics(model):
    """Give norms statistics and parameters as training would leave them."""
    torch.manual_seed(3)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.5), part.running_var.uniform_(0.3, 2)
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 1.5), nn.init.normal_(part.bias)
    return model


def pair(kind=Block, on="bf16"):
    torch.manual_seed(0)
    plain = statistics(kind()).eval()
    ours = amp_graph.freeze(amp_graph.convert(copy.deepcopy(plain), on, strict=True))
    return ours, amp_graph.freeze(amp_graph.convert(plain, OFF, strict=True))


def folded(model):
    return sum(kind[0] == "folded" for kind, _ in conversion_of(model).captured.frozen._kept)


@torch.no_grad()
def called(model, x=X):
    return model(x)


def assert_close(a, b):
    assert a.dtype == b.dtype
    assert (a - b).norm() <= 2**-6 * b.norm()


def exact_of(model):
    return copy.deepcopy(amp_graph.revert(copy.deepcopy(model))).double()(X.double())


@layers(
    lambda activation, in_place: dict(
        activation=activation,
        in_place=in_place,
        stem=nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        norm0=nn.BatchNorm2d(16),
        deep=nn.Conv2d(16, 16, 3, 1, 1, groups=16),
        norm1=nn.BatchNorm2d(16),
        last=nn.Conv2d(16, 16, 1),
        norm2=nn.BatchNorm2d(16),
    )
)
def Activations(self, x):
    """What EfficientNet, MobileNetV3 and YOLO have behind their norms, the last behind a sum."""
    x = self.activation(self.norm0(self.stem(x)), inplace=self.in_place)
    h = self.activation(self.norm1(self.deep(x)), inplace=self.in_place)
    return self.activation(self.norm2(self.last(h)) + x, inplace=self.in_place)


FOLDED = {f"relu, {in_place}": (lambda in_place=in_place: Block(in_place), 4, "relu") for in_place in (True, False)} | {
    f"{f.__name__}, {in_place}": (lambda f=f, in_place=in_place: Activations(f, in_place), 3, f.__name__)
    for f in (F.silu, F.hardswish)
    for in_place in (True, False)
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOLDED)
def test_every_form_is_folded_with_its_activation(name):
    kind, count, activation = FOLDED[name]
    ours, theirs = pair(kind)
    exact = exact_of(theirs)
    assert (called(ours) - exact).norm() <= 1.1 * (called(theirs) - exact).norm()
    assert (folded(ours), folded(theirs)) == (count, 0)
    graph = amp_graph.report(ours).graphs[0].text
    assert graph.count("convolution_with_norm") == count
    assert "batch_norm" not in graph
    assert activation not in graph.replace(f"'{activation}'", "")
    x = X.clone()
    x[0, 0, 0, 0], x[1, 1, 5, 5] = float("nan"), float("inf")
    assert called(theirs, x).isnan().any()
    assert torch.equal(called(ours, x).isnan(), called(theirs, x).isnan()), "through the activation"


@pytest.mark.parametrize("offset", [0.0, 1.0, 20.0])
def test_folded_is_as_exact_as_unfolded(offset):
    ours, theirs = pair()
    for model in (ours, theirs):
        with torch.no_grad():
            model.conv3.bias += offset
            model.norm3.running_mean += offset
    errors = [(called(model) - exact_of(theirs)).norm() for model in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1]


@torch.no_grad()
def train_a_step(model):
    model.train()(torch.randn(X.shape, generator=torch.Generator().manual_seed(5)))
    model.eval()


WRITES = {
    "a step of training": train_a_step,
    "statistics": lambda m: m.norm0.running_mean[3].fill_(4.0),
    "statistics, secretly": lambda m: m.norm0.running_var.data[2].fill_(9.0),
    "a weight": lambda m: nn.init.constant_(m.conv1.weight[1], 2.0),
    "a norm": lambda m: nn.init.constant_(m.norm1.weight[3], 5.0),
    "a bias": lambda m: nn.init.constant_(m.conv1.bias[1], 5.0),
    "another eps": lambda m: setattr(m.norm1, "eps", 2.0),
    "a state that is loaded": lambda m: m.load_state_dict(
        {k: v * 1.5 if v.is_floating_point() else v for k, v in m.state_dict().items()}
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen(name):
    ours, theirs = pair()
    before = called(ours)
    WRITES[name](ours), WRITES[name](theirs)
    assert_close(first := called(ours), called(theirs))
    assert torch.equal(called(ours), first)
    assert not torch.allclose(first, before, rtol=1e-3)
    assert folded(ours) == 4 + (name == "another eps")


@layers(lambda: {name: nn.Conv2d(3, 3, 3, padding=1) for name in "abc"} | {name: nn.BatchNorm2d(3) for name in "nmo"})
def ReadTwice(self, x):
    """What is between is read by others, or overwritten: nothing to fold, or not all of it."""
    h = self.a(x)
    y = self.n(h) + h
    z = self.m(self.b(y))
    w = self.o(self.c(y))
    y.mul_(2.0)
    return (z + z.relu() + torch.relu(w + y)).mean((2, 3))


def test_what_others_read_stays():
    ours, theirs = pair(ReadTwice)
    assert_close(called(ours), called(theirs))
    text = amp_graph.report(ours).graphs[0].text
    assert text.count("batch_norm") >= 1
    assert "mul_" in text


@layers(lambda: dict(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8)))
def Twice(self, x):
    """By its statistics it is one norm; what is kept of it is of one eps, whichever call made it."""
    n = self.norm
    by_name = dict(running_var=n.running_var, weight=n.weight, bias=n.bias, training=False, eps=1.0)
    first = F.batch_norm(self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, 1e-5)
    return torch.cat([first, F.batch_norm(self.conv(x), n.running_mean, **by_name)])


def test_norms_and_convolutions_that_are_read_twice():
    ours, theirs = pair(Twice)
    for x in (X, X[:1]):
        assert_close(called(ours, x), called(theirs, x))


@layers(
    lambda late=False: dict(
        convs=nn.ModuleList(nn.Conv2d(a, 16, k, padding=k // 2, bias=False) for a, k in SIZES),
        norms=nn.ModuleList(nn.BatchNorm2d(16) for _ in SIZES),
        late=late,
    ),
    part=lambda self, index, x: self.norms[index](self.convs[index](x)),
)
def Residual(self, x):
    """Two blocks, the first of which projects; ``late``: what the second adds to is read once more behind it."""
    x = F.relu(self.part(0, x) + self.part(1, x))
    h = F.relu(self.part(2, x))
    y = F.relu(x + self.part(3, h))
    return (self.part(4, x) if self.late else y).mean((2, 3)) + y.mean((2, 3))


SIZES = ((3, 1), (3, 3), (16, 3), (16, 1), (16, 1))


def in_place(model):
    nodes = conversion_of(model).graphs[0].rewritten.gm.graph.nodes
    sums = [n for n in nodes if n.name.startswith("convolution_with_norm") and len(n.args) >= 5]
    return [n.args[5:] == (True,) for n in sums]


@pytest.mark.parametrize("late", [False, True])
def test_sums_take_the_place_of_what_is_read_no_more_bit_for_bit(late, monkeypatch):
    ours, _ = pair(lambda: Residual(late))
    got = called(ours)
    assert in_place(ours) == [True, not late]
    assert folded(ours) == 4 + late, "those of one place, too"
    monkeypatch.setattr(fold_batch_norms, "_is_last_reader", lambda node, other: False)
    apart, _ = pair(lambda: Residual(late))
    assert torch.equal(got, called(apart))
    assert in_place(apart) == [False, False]
    monkeypatch.setattr(fold_batch_norms, "_is_last_reader", lambda node, other: True)
    wrong, _ = pair(lambda: Residual(late))
    assert torch.equal(got, called(wrong)) is not late, "control: written over what is read later"


def test_control_another_activation_is_another_result(monkeypatch):
    monkeypatch.setattr(folded_conv, "KERNELS_OWN", {"silu": "hardswish"})
    ours, theirs = map(called, pair(lambda: Activations(F.silu, True)))
    assert (ours - theirs).norm() > 2**-6 * theirs.norm()
