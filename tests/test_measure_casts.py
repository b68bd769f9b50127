"""The counters of casts, saved bytes and dtypes, on models whose answers are known."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.measure import CastCounter, DtypeLog, compare, saved_bytes

BF16 = torch.bfloat16


def autocast():
    return torch.autocast("cpu", BF16)


def counted(model, x, context=autocast):
    with CastCounter(model) as casts:
        with context():
            loss = model(x).float().sum()
        casts.phase = "backward"
        loss.backward()
    return casts


class ThreeCasts(nn.Module):
    """Exactly three activation casts, and those of one weight (used twice)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        w = self.weight.to(BF16)
        y = F.linear(x.to(BF16), w).float()
        return F.linear(y.to(BF16), w)


def test_casts_are_counted_by_kind_with_their_bytes():
    model, x = ThreeCasts(), torch.randn(2, 4, requires_grad=True)
    with CastCounter(model) as casts:
        y = model(x)
        casts.phase = "backward"
        y.sum().backward()
    assert (casts.forward_activation, casts.backward_gradient, casts.weight, casts.total) == (3, 3, 2, 8)
    assert casts.bytes == (6 * 8 + 2 * 16) * (4 + 2)
    assert [c.consumers[0] for c in casts.of("forward", "activation")] == [
        "aten.mm",
        "aten._to_copy",
        "aten.mm",
    ]
    assert "3 activation, 3 gradient, 2 weight" in str(casts)
    assert "forward weight: f32->bf16[4, 4] for aten.mm" in casts.table()


def test_autocast_of_a_linear_is_three_casts_and_two_of_gradients():
    model = nn.Linear(4, 4)
    casts = counted(model, torch.randn(2, 4))
    # Sorted: the order of the two weights' gradients is the engine's.
    assert sorted(map(str, casts.events)) == [
        "activation: bf16->f32[2, 4] for aten.sum",
        "activation: f32->bf16[2, 4] for aten.addmm",
        "gradient: f32->bf16[2, 4] for aten.mm+aten.sum",
        "weight: bf16->f32[4, 4] for ToCopyBackward0",
        "weight: bf16->f32[4] for ToCopyBackward0",
        "weight: f32->bf16[4, 4] for aten.addmm",
        "weight: f32->bf16[4] for aten.addmm",
    ]


def test_a_model_without_casts_counts_nothing_and_gradients_are_still_stolen():
    model = nn.Linear(4, 4)
    log = DtypeLog()
    with CastCounter(model) as casts, log:
        model(torch.randn(2, 4)).sum().backward()
    assert casts.total == 0
    # An accumulator that finds its gradient held by somebody else copies it: that would be our doing.
    assert all("copy" not in name and "clone" not in name for name, _ in log.entries)


def test_views_of_weights_are_weights_and_a_square_activation_is_not():
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x.to(BF16) @ self.weight.t().to(BF16)

    x = torch.randn(4, 4, requires_grad=True)
    casts = counted(Viewed(), x, context=torch.enable_grad)
    assert [c.kind for c in casts.of("forward")] == ["activation", "weight", "activation"]
    assert sorted(c.kind for c in casts.of("backward")) == ["gradient", "gradient", "weight"]


class CastsInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        low = x.to(BF16), w.to(BF16)
        ctx.save_for_backward(*low)
        return low[0] @ low[1]

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad @ w.t()).float(), (x.t() @ grad).float()


def test_a_weight_gradient_cast_inside_a_custom_function_is_found_by_its_storage():
    class Custom(ThreeCasts):
        def forward(self, x):
            return CastsInside.apply(x, self.weight)

    casts = counted(Custom(), torch.randn(4, 4, requires_grad=True), context=torch.enable_grad)
    assert len(casts.of("forward", "weight")) == 1
    assert len(casts.of("backward", "weight")) == 1
    assert casts.backward_gradient == 2


def test_recomputation_counts_as_backward_without_being_told():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with CastCounter(model) as casts, autocast():
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(casts.of("forward", "weight")) == 2
    assert len(casts.of("backward", "weight")) >= 2
    assert casts.forward_activation == 1


def test_complex_integer_and_same_dtype_conversions_are_not_casts():
    with CastCounter() as casts:
        x = torch.randn(3)
        x.to(torch.float32, copy=True)
        x.to(torch.complex64).to(torch.complex128)
        x.int().float()
        torch.zeros(3).copy_(x)
    assert casts.total == 0
    with CastCounter() as casts:
        torch.zeros(3, dtype=BF16).copy_(x)
    assert casts.total == 1


def test_dynamo_captures_and_runs_its_graph_under_the_instruments():
    runs = []

    def backend(gm, inputs):
        return lambda *flat: runs.append("graph") or gm(*flat)

    model = ThreeCasts()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with CastCounter(model) as casts, DtypeLog():
            compiled(torch.randn(2, 4))
        assert (casts.forward_activation, casts.weight) == (3, 1)
    assert runs == ["graph", "graph"]


# --- saved bytes ---


def test_saved_bytes_counts_a_storage_once_and_no_parameters():
    model, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)

    def twice():
        y = model(x)
        return (y * y.view(8, 4)).sum()

    assert saved_bytes(twice, model) == (8 * 4 + 8 * 4) * 4
    assert saved_bytes(lambda: (x * 2).sum(), model) == 0


def test_saved_bytes_tells_weight_copies_apart():
    model, x = nn.Linear(4, 6), torch.randn(8, 4, requires_grad=True)

    def low():
        with autocast():
            return model(x)

    assert saved_bytes(low, model) == (8 * 4 + 4 * 6) * 2
    assert saved_bytes(low, model, weight_copies=False) == 8 * 4 * 2


# --- dtype logs ---


def logged(fn):
    with DtypeLog() as log:
        fn()
    return log


def test_a_log_holds_operations_and_not_casts_or_moves():
    x = torch.randn(4, 4)
    log = logged(lambda: (x.to(BF16).t().reshape(2, 8) + 1).float().softmax(-1).argmax())
    assert log.entries == [("aten.add", (BF16,)), ("aten._softmax", (torch.float32,))]


def test_equal_logs_have_no_differences_and_others_name_them():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(2, 4)

    def low():
        with autocast():
            model(x)

    def wrong():
        with autocast():
            model[2](F.gelu(model[0](x).float()).exp())

    assert compare(logged(low), logged(low)) == []
    assert compare(logged(low), logged(lambda: model(x))) == [
        "0: aten.addmm bfloat16 | float32",
        "1: aten.gelu bfloat16 | float32",
        "2: aten.addmm bfloat16 | float32",
    ]
    assert compare(logged(low), logged(wrong)) == [
        "1: aten.gelu bfloat16 | float32",
        "2: - | aten.exp float32",
    ]
