"""Pools without gradients take maxima by halves: the same numbers, NaN and infinities among them; others stay."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.memory import max_pool
from amp_graph.passes.memory.max_pool import max_pool_by_halves
from tests.passes.graphs import Function

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
OTHERS = {
    "an odd width": lambda x: F.max_pool2d(x[..., 1:], 2),
    "no padding": lambda x: F.max_pool2d(x, 3, 2),
    "a stride of 1": lambda x: F.max_pool2d(x, 2, 1),
    "rounded up": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "dilated": lambda x: F.max_pool2d(x, 2, 2, dilation=2),
    "wide": lambda x: F.max_pool2d(x, (2, 4)),
    "small": lambda x: F.max_pool2d(x[..., :2], 2),
    "one image": lambda x: F.max_pool2d(x[0], 2),
    "with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
}


def images(shape, layout="contiguous", dtype=torch.bfloat16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[::7], x.view(-1)[::11], x.view(-1)[::13] = float("nan"), float("-inf"), float("inf")
    return x.contiguous(memory_format=LAYOUTS[layout])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (1, 16, 4, 4), (3, 5, 4, 12)])
def test_the_maxima_are_those_of_torch(shape, size, layout, dtype):
    x = images(shape, layout, dtype)
    found, expected = max_pool_by_halves(x, size), F.max_pool2d(x, size, 2, size - 2)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert found.isnan().any()
    assert found[0].stride() == expected[0].stride()


def converted(pool, monkeypatch, grad=False):
    monkeypatch.setattr(max_pool, "FEWEST", 1)
    model = amp_graph.convert(Function(lambda s, x: pool(F.relu(x)) * 1), "bf16", strict=True)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        return model, x, model(x)


@pytest.mark.parametrize(
    "pool", [torch.nn.MaxPool2d(2), torch.nn.MaxPool2d(3, 2, 1), lambda x: F.max_pool2d(x, [2, 2])]
)
def test_a_model_without_gradients_takes_them_by_halves(pool, monkeypatch):
    model, x, out = converted(pool, monkeypatch)
    assert torch.equal(out, pool(F.relu(x)))
    assert "max_pool_by_halves(" in amp_graph.report(model).graphs[0].text


def test_transforms_get_torchs_own_pool():
    x = torch.randn(3, 2, 4, 8, 8)
    found = torch.vmap(lambda x: max_pool_by_halves(x, 3))(x)
    assert torch.equal(found, F.max_pool2d(x.flatten(0, 1), 3, 2, 1).unflatten(0, (3, 2)))


@pytest.mark.parametrize("name", [*OTHERS, "with gradients"])
def test_all_else_stays(name, monkeypatch):
    pool = OTHERS.get(name, torch.nn.MaxPool2d(2))
    model, x, out = converted(pool, monkeypatch, grad=name == "with gradients")
    assert torch.equal(out, pool(F.relu(x)))
    assert "max_pool_by_halves" not in amp_graph.report(model).graphs[0].text
