"""Weights packed for the kernel: the results of plain copies, never stale, and only without gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.inference import prepack_weights
from amp_graph.passes.backends.cpu.linear.panel_gemm import library
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from tests.layers import forward_of, layers

pytestmark = [
    pytest.mark.skipif(not multiplies_bf16(), reason="nothing is packed on a CPU that does not multiply bf16"),
    pytest.mark.filterwarnings("ignore:amp_graph. weights of the frozen"),
]
PANELS, ONEDNN = "panels", "oneDNN"
WIDTH = 48
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[ONEDNN, PANELS], autouse=True)
def kernel(request, monkeypatch):
    """By which kernel weights are multiplied that few rows read."""
    if request.param == ONEDNN:
        monkeypatch.setattr(prepack_weights, "panels_are_profitable", lambda *sizes: False)
    elif library() is None:
        pytest.skip("needs AVX512_BF16 and a C compiler")
    return request.param


@layers(
    lambda: dict(
        first=nn.Linear(WIDTH, 64),
        second=nn.Linear(64, WIDTH, bias=False),
        added=nn.Parameter(torch.randn(WIDTH, 32) / 7),
        bias=nn.Parameter(torch.randn(32)),
        multiplied=nn.Parameter(torch.randn(32, WIDTH) / 6),
        twice=nn.Parameter(torch.randn(WIDTH, WIDTH) / 7),
        one=nn.Linear(WIDTH, 1),
    )
)
def Net(self, x):
    """Every form of a product: linear with and without bias, addmm, matmul, and a weight that two linears read."""
    x = self.second(torch.relu(self.first(x)))
    x = torch.addmm(self.bias, x, self.added) @ self.multiplied
    x = F.linear(torch.tanh(F.linear(x, self.twice)), self.twice)
    return self.one(x) + x


PACKED = {"first.weight", "second.weight", "added", "multiplied", "twice"}


def pair(kind=Net, on="bf16", off="keep_outputs=true"):
    """The same model with packed weights and without."""
    torch.manual_seed(0)
    plain = kind()
    ours = amp_graph.freeze(amp_graph.convert(copy.deepcopy(plain), on, strict=True))
    return ours, amp_graph.freeze(amp_graph.convert(plain, f"bf16,skip=prepack_weights,{off}", strict=True))


def packed(model):
    """How many weights are packed."""
    return sum(kind[0] in ("packed", "panels") for kind, _ in conversion_of(model).captured.frozen._kept)


@torch.no_grad()
def assert_close(ours, theirs, x=X):
    """Equal but for the order of sums: far within a rounding to bf16 of the largest result."""
    a, b = ours(x), theirs(x)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert not a.numel() or (a - b).abs().max() <= 2**-7 * b.abs().max()


def test_every_form_is_packed_and_gives_what_plain_copies_give():
    ours, theirs = pair()
    for call in range(3):
        assert_close(ours, theirs, X + call)
        assert packed(ours) == len(PACKED)
    assert packed(theirs) == 0
    assert_as_exact(ours, theirs)


@torch.no_grad()
def assert_as_exact(ours, theirs):
    exact = copy.deepcopy(amp_graph.revert(copy.deepcopy(theirs))).double()(X.double())
    errors = [(model(X) - exact).norm() for model in (ours, theirs)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (0, WIDTH), (2, 3, WIDTH), (2, 1, 4, WIDTH)])
def test_inputs_of_any_shape(shape):
    ours, theirs = pair(lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, 32, bias=False)))
    assert_close(ours, theirs, torch.randn(shape))
    assert packed(ours) == 2


ACTIVATIONS = {
    "relu": torch.relu,
    "relu_": torch.relu_,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
}


@layers(
    lambda activation, shared=False: dict(
        first=nn.Linear(WIDTH, 64), second=nn.Linear(64, WIDTH), activation=activation, shared=shared
    )
)
def Activated(self, x):
    before = self.first(x)
    out = self.second(self.activation(before))
    return out + before.sum() if self.shared else out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_goes_into_the_product(kernel, name):
    ours, theirs = pair(lambda: Activated(ACTIVATIONS[name]))
    assert_close(ours, theirs)
    assert_as_exact(ours, theirs)
    x = X.clone()
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    with torch.no_grad():
        assert torch.equal(ours(x).isnan(), theirs(x).isnan())
    graph = amp_graph.report(ours).graphs[0].text
    assert graph.count(f"linear_of_{'panels' if kernel == PANELS else 'packed'}(") == 2
    behind = sum(f" {word}(" in graph for word in ("gelu", "relu", "relu_", "silu"))
    assert behind == (kernel == PANELS and "relu" not in name)  # a gelu and a silu are oneDNN's
    assert packed(ours) == 2


def test_a_product_that_others_read_too_keeps_its_activation_behind_it():
    ours, theirs = pair(lambda: Activated(F.gelu, shared=True))
    assert_close(ours, theirs)
    assert "gelu(" in amp_graph.report(ours).graphs[0].text


@forward_of(nn.Linear)
@torch.enable_grad()
def EnablesGradients(self, x):
    """Called without gradients, records some all the same."""
    return nn.Linear.forward(self, x)


def test_a_region_that_enables_gradients_has_them():
    ours, theirs = pair(lambda: EnablesGradients(WIDTH, WIDTH), "bf16,keep_outputs=false", "keep_outputs=false")
    with torch.no_grad():
        results = [model(X) for model in (ours, theirs)]
    for result in results:
        result.sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert packed(ours) == 0


def test_lists_of_autocast_run_what_was_written():
    ours, theirs = pair(on="bf16,lists=autocast_cpu")
    assert_close(ours, theirs)
    assert packed(ours) == 0


def test_parameters_are_no_constants_where_inductor_freezes():
    plain, _ = pair()
    with torch._inductor.config.patch(freezing=True):
        ours, theirs = pair()
        assert_close(ours, theirs)
        assert packed(ours) == len(PACKED)
        for model in (ours, theirs):
            nn.init.constant_(model.first.weight[3, 5:6], 40.0)
        assert_close(ours, theirs)
    assert_close(plain, plain)
    texts = [amp_graph.report(model).graphs[0].text for model in (ours, plain)]
    assert texts[0] == texts[1]
