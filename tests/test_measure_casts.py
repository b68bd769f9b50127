"""The counters of casts, saved bytes and dtypes, on models whose answers are known."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers
from tests.measure import CastCounter, DtypeLog, compare, saved_bytes

BF16 = torch.bfloat16
autocast = partial(torch.autocast, "cpu", BF16)


def counted(model, x, context=autocast):
    with CastCounter(model) as casts:
        with context():
            loss = model(x).float().sum()
        casts.phase = "backward"
        loss.backward()
    return casts


@layers(lambda: dict(weight=nn.Parameter(torch.randn(4, 4))))
def ThreeCasts(self, x):
    """Exactly three activation casts, and those of one weight (used twice)."""
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
