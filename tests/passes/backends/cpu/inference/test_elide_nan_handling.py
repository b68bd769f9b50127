"""Relus and maxima for finite values alone: the same bits, and what is infinite or NaN shows as it would without."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.inference import elide_nan_handling, prepack_weights
from amp_graph.passes.torch_compat.cpu import multiplies_bf16
from amp_graph.passes.weights import finite_check
from amp_graph.passes.weights.finite_check import FiniteWeights, max_pool_of

pytestmark = pytest.mark.skipif(not multiplies_bf16(), reason="no norm is folded on a CPU that does not multiply bf16")
OFF = "bf16,skip=elide_nan_handling"
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_images_are_worth_it(monkeypatch):
    monkeypatch.setattr(elide_nan_handling, "looking_is_profitable", lambda looked_at, spared: True)


def part(before, after, size=3):
    return nn.Sequential(nn.Conv2d(before, after, size, padding=size // 2, bias=False), nn.BatchNorm2d(after))


class Images(nn.Module):
    """Down by both pools, a residual block, up again by a transposed convolution, beside what was kept."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = part(3, 8), part(8, 8)
        self.deep, self.wide, self.short = part(8, 8), part(8, 16, 1), part(8, 16, 1)
        self.up, self.join = nn.ConvTranspose2d(16, 8, 2, 2), part(16, 8)
        self.head = part(8, 8)

    def forward(self, x):
        kept = F.relu(self.stem(x))
        x = F.max_pool2d(kept, 2)
        x = F.relu(self.down(x))
        x = F.relu(self.short(x) + self.wide(F.relu(self.deep(x))))
        x = torch.cat([kept, self.up(x)], 1)
        x = F.max_pool2d(F.relu(self.join(x)), 3, 2, 1)
        return F.relu(self.head(x))


def pair(kind=Images):
    torch.manual_seed(0)
    plain = kind().eval()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3), module.running_var.uniform_(0.5, 1.5), nn.init.normal_(module.bias)
    return amp_graph.convert(copy.deepcopy(plain), "bf16"), amp_graph.convert(plain, OFF)


@torch.no_grad()
def called(model, x=X, times=4):
    for _ in range(times):
        out = model(x)
    return out


def same(a, b):
    """Say whether two results are the same bits, but for those of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9))


def text_of(model):
    return amp_graph.report(model).graphs[0].text


@pytest.mark.parametrize("verify", ["0", "1"])
def test_the_same_bits(verify, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", verify)
    ours, theirs = pair()
    for times in range(1, 5):
        assert same(called(ours, times=1), called(theirs, times=1)), times
    assert text_of(ours).count("finite=") == 9, "seven convolutions, and two pools"
    assert text_of(ours).count("= all_finite(") == 2, "one of the images, and one of the weight between"
    assert "finite" not in text_of(theirs)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_images_that_are_not_finite(bad):
    ours, theirs = pair()
    called(ours), called(theirs)
    for place in ((0, 0, 0, 0), (1, 2, 7, 9)):
        x = X.clone()
        x[place] = bad
        assert same(called(ours, x, 1), called(theirs, x, 1))
        assert not called(ours, x, 1).isfinite().all()
    assert same(called(ours, times=1), called(theirs, times=1))


TENSORS = [name for name, t in Images().state_dict().items() if t.is_floating_point()]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("early", [True, False])
def test_parameters_and_statistics_that_are_not_finite(name, bad, early):
    ours, theirs = pair()
    if not early:
        called(ours), called(theirs)
    kept = ours.state_dict()[name].clone()
    for model in (ours, theirs):
        model.state_dict()[name].view(-1)[0] = bad  # the trace of a write, or for statistics none
    for _ in range(4):
        assert same(called(ours, times=1), called(theirs, times=1))
    for model in (ours, theirs):
        model.state_dict()[name].copy_(kept)
    assert same(called(ours), called(theirs))
    assert called(ours).isfinite().all()
    assert conversion_of(ours).copies.finite.is_all_finite


def test_a_variance_below_zero_makes_nan_of_what_is_finite():
    ours, theirs = pair()
    called(ours), called(theirs)
    for model in (ours, theirs):
        model.down[1].running_var[0] = -1.0
    for _ in range(4):
        assert called(ours, times=1).isnan().any()
        assert same(called(ours, times=1), called(theirs, times=1))


def test_control_nan_is_hidden_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(finite_check, "is_finite", lambda x: True)
    ours, theirs = pair()
    x = X.clone()
    x[0, 0, 0, 0] = NAN
    assert not same(called(ours, x), called(theirs, x))


def test_control_weights_that_are_not_finite_are_noted(monkeypatch):
    monkeypatch.setattr(FiniteWeights, "is_all_finite", True)
    ours, theirs = pair()
    for model in (ours, theirs):
        with torch.no_grad():
            model.down[0].weight[0, 0, 0, 0] = NAN
    assert not same(called(ours), called(theirs))


class Between(nn.Module):
    """What makes NaN of finite values, and what writes over them, between convolutions."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = part(3, 8), part(8, 8), between

    def forward(self, x):
        return F.relu(self.b(self.between(F.relu(self.a(x)) - 0.5)))


@pytest.mark.parametrize(
    "between", [torch.log, torch.sqrt, lambda h: h / 0.0, lambda h: h.log_(), lambda h: h.mul_(INF), lambda h: h * INF]
)
def test_what_makes_nan_is_looked_at(between):
    ours, theirs = pair(lambda: Between(between))
    assert called(theirs).isnan().any()
    assert same(called(ours), called(theirs))


def test_nobody_looks_where_that_takes_as_long(monkeypatch):
    monkeypatch.undo()
    ours, theirs = pair()
    assert same(called(ours), called(theirs))
    assert "all_finite" not in text_of(ours)


def test_gradients_leave_all_as_it_is():
    ours, _ = pair()
    ours(X).sum().backward()
    assert "finite" not in text_of(ours)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, 5, 2, 8), (3, 16, 14, 6)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_maxima_are_those_of_the_pool(size, shape, layout):
    draws = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 10
    x = draws.relu().bfloat16().contiguous(memory_format=layout)
    x[0, 0, 0, 0] = INF if layout is torch.contiguous_format else 0
    pool = max_pool_of(FiniteWeights())
    assert torch.equal(pool(x, size, True), F.max_pool2d(x, size, 2, size - 2))
    below = (draws.clamp(max=-1)).bfloat16()
    assert not torch.equal(pool(below, size, True), F.max_pool2d(below, size, 2, size - 2)), "control: below zero"
    assert torch.equal(pool(below, size, False), F.max_pool2d(below, size, 2, size - 2))


class Pools(nn.Module):
    """Pools that are no maxima of pairs, and one of what lies below zero."""

    def __init__(self):
        super().__init__()
        self.a = part(3, 8)

    def forward(self, x):
        h = F.relu(self.a(x))
        odd = F.max_pool2d(h[..., 1:], 2)
        found = [odd, F.max_pool2d(h, 3, 2), F.max_pool2d(h, 2, 1), F.max_pool2d(h, 3, 2, 1, ceil_mode=True)]
        found += [F.max_pool2d(h, 2, 2, dilation=2), F.max_pool2d(h, (2, 4)), F.max_pool2d(h - 1, 2)]
        return [f.sum((2, 3)) for f in found]


def test_other_pools_stay():
    ours, theirs = pair(Pools)
    assert all(map(same, called(ours), called(theirs)))
    assert "max_pool_of_finite" not in text_of(ours)
    assert text_of(ours).count("max_pool2d(") == 7


def test_copies_are_looked_at_once_a_write(monkeypatch):
    looked_at = []
    is_finite = finite_check.is_finite
    monkeypatch.setattr(finite_check, "is_finite", lambda x: looked_at.append(x) or is_finite(x))
    weights, low = FiniteWeights(), torch.ones(4)
    assert weights.is_kept_finite(low)
    assert weights.is_kept_finite(low)
    assert len(looked_at) == 1
    low[1] = NAN
    assert not weights.is_kept_finite(low)
    assert len(looked_at) == 2
    looked_at.clear()
    del low
    gc.collect()
    assert weights.is_kept_finite(torch.ones(4))
    assert len(weights._known) == 1, "what is gone is forgotten"


def test_a_parameter_that_is_gone_spoils_nothing():
    weights, weight = FiniteWeights(), torch.ones(4)
    weights.note(1, weight, False)
    assert not weights.is_all_finite
    del weight
    gc.collect()
    assert weights.is_all_finite


class Tower(nn.Module):
    """Linears of a recommendation model, one without a relu between, and a sum of products that is looked at."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 72), nn.Linear(72, 68, bias=False), nn.Linear(68, 70)
        self.d = nn.Linear(70 * 2, 66)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.relu(self.c(self.b(x)))
        return F.relu(self.d(torch.cat([x, (x.t() @ x)[:1].expand_as(x)], 1)))


ROWS = torch.randn(40, 12, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def by_onednn(monkeypatch):
    monkeypatch.setattr(prepack_weights, "panels_are_profitable", lambda *given: False)


def test_linears_have_the_same_bits(by_onednn):
    ours, theirs = pair(Tower)
    for times in range(1, 5):
        assert same(called(ours, ROWS, 1), called(theirs, ROWS, 1)), times
    assert text_of(ours).count("relu_linear(") == 3
    assert "relu_linear(" not in text_of(theirs)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_are_not_finite(bad, by_onednn):
    ours, theirs = pair(Tower)
    called(ours, ROWS), called(theirs, ROWS)
    x = ROWS.clone()
    x[3, 4] = bad
    assert same(called(ours, x, 1), called(theirs, x, 1))
    assert not called(ours, x, 1).isfinite().all()
    assert same(called(ours, ROWS, 1), called(theirs, ROWS, 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("bad", [NAN, -INF])
@pytest.mark.parametrize("name", list(Tower().state_dict()))
def test_linears_whose_parameters_are_not_finite(name, bad, early, by_onednn):
    ours, theirs = pair(Tower)
    if not early:
        called(ours, ROWS), called(theirs, ROWS)
    kept = ours.state_dict()[name].clone()
    for model in (ours, theirs):
        model.state_dict()[name].view(-1)[0] = bad
    for _ in range(4):
        assert same(called(ours, ROWS, 1), called(theirs, ROWS, 1))
    for model in (ours, theirs):
        model.state_dict()[name].copy_(kept)
    assert same(called(ours, ROWS), called(theirs, ROWS))
    assert called(ours, ROWS).isfinite().all()


def test_control_linears_hide_nan_where_nobody_looks(by_onednn, monkeypatch):
    monkeypatch.setattr(finite_check, "is_finite", lambda x: True)
    ours, theirs = pair(Tower)
    x = ROWS.clone()
    x[3, 4] = NAN
    assert not same(called(ours, x), called(theirs, x))


def test_control_linears_whose_weights_nobody_noted(by_onednn, monkeypatch):
    monkeypatch.setattr(FiniteWeights, "is_all_finite", True)
    ours, theirs = pair(Tower)
    called(ours, ROWS), called(theirs, ROWS)
    for model in (ours, theirs):
        with torch.no_grad():
            model.b.weight[0, 0] = NAN
    assert not same(called(ours, ROWS), called(theirs, ROWS))


def test_weights_are_looked_at_only_where_there_is_a_relu(by_onednn, monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        "amp_graph.passes.backends.cpu.inference.prepacked_linear.is_finite", lambda x: looked_at.append(x) or True
    )
    for layers, count in (([nn.Linear(12, 72)], 0), ([nn.Linear(12, 72), nn.ReLU()], 1)):
        model = amp_graph.convert(nn.Sequential(*layers).eval(), "bf16")
        called(model, ROWS)
        assert len({id(x) for x in looked_at}) >= count
        assert bool(looked_at) == bool(count)


def test_a_weight_that_is_updated_every_few_calls_is_not_looked_at(by_onednn, monkeypatch):
    """As where an agent acts a few times between two updates: what looking spares is less than it takes."""
    looked_at = []
    monkeypatch.setattr(
        "amp_graph.passes.backends.cpu.inference.prepacked_linear.is_finite", lambda x: looked_at.append(x) or True
    )
    ours, theirs = pair(Tower)
    for _ in range(3):
        assert same(called(ours, ROWS, 2), called(theirs, ROWS, 2))
        assert not looked_at
        for model in (ours, theirs):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.25)
    called(ours, ROWS)
    assert looked_at


class Either(nn.Module):
    """Two graphs that read the same weights, of which one has relus."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 72), nn.Linear(72, 70)

    def forward(self, x, relus):
        return F.relu(self.b(F.relu(self.a(x)))) if relus else self.b(self.a(x))


def test_a_weight_that_was_packed_for_another_graph_is_noted(by_onednn):
    ours, theirs = pair(Either)
    with torch.no_grad():
        for model in (ours, theirs):
            for relus in (True, False) * (4):
                model(ROWS, relus)
        for bad in (NAN, 0.5):
            for model in (ours, theirs):
                model.a.weight[0, 0] = bad
                for _ in range(4):
                    model(ROWS, False)
            found, expected = ours(ROWS, True), theirs(ROWS, True)
            assert found.isnan().any() == (bad != 0.5)
            assert same(found, expected)
    assert conversion_of(ours).copies.finite.is_all_finite


def test_memory_that_others_hold_is_noted_for_the_graph_that_asks(by_onednn):
    """What was packed for a graph without relus is read again for its bits, not for signs of writes."""
    ours, theirs = pair(Either)
    held = [model.a.weight.detach().numpy() for model in (ours, theirs)]
    for values, model in zip(held, (ours, theirs), strict=True):
        values[0, 0] = NAN
        called(lambda x, model=model: model(x, False), ROWS)
    for times in range(1, 6):
        with torch.no_grad():
            found, expected = ours(ROWS, True), theirs(ROWS, True)
        assert found.isnan().any(), times
        assert same(found, expected), times
