"""A value by its own transpose: the same product, and a gradient as near to fp64's as that of two products."""

import pytest
import torch
from torch.autograd import forward_ad

import amp_graph
from amp_graph.passes.backends.cpu.linear import gram_matrix
from amp_graph.passes.backends.cpu.linear.gram_matrix import FuseGramMatrix, own_product
from tests.passes.graphs import BF16, Function, capture_function, run_step, with_and_without

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))
W = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)) / 4


def rows(s, x):
    return x @ s.w


OWN = {
    "by transpose": lambda s, x: (h := rows(s, x)) @ h.transpose(1, 2),
    "from behind": lambda s, x: (h := rows(s, x)) @ h.transpose(-1, -2),
    "by mT": lambda s, x: torch.bmm(h := rows(s, x), h.mT),
    "by permute": lambda s, x: torch.matmul(h := rows(s, x), h.permute(0, 2, 1)),
    "matrices": lambda s, x: torch.mm(h := rows(s, x[0]), h.t()),
    "by T": lambda s, x: (h := rows(s, x[0])) @ h.T,
    "columns": lambda s, x: (h := rows(s, x).transpose(1, 2)).transpose(1, 2) @ h,
    "read elsewhere, too": lambda s, x: (h := rows(s, x)) @ h.mT + h.sum() + (h.mT * 2).sum(),
    "summed in fp32 behind": lambda s, x: ((h := rows(s, x)) @ h.mT).float().exp().log(),
    "four dimensions": lambda s, x: (h := rows(s, x).view(2, 2, 6, 16)) @ h.mT,
}
OTHERS = {
    "of another": lambda s, x: rows(s, x) @ rows(s, x * 2).mT,
    "not turned": lambda s, x: (h := rows(s, x[0, :, :16])) @ s.w + h,
    "of a part": lambda s, x: (h := rows(s, x)) @ h[:, :4].mT,
    "of the batch": lambda s, x: (h := rows(s, x[:, :4])) @ h.transpose(0, 1)[:, :, :1].expand(4, 4, 16).mT,
    "turned twice": lambda s, x: (h := rows(s, x[:, :, :])) @ h.mT.contiguous(),
    "taller than wide": lambda s, x: (h := rows(s, x.view(24, 16))) @ h.mT,
}


def passed(function):
    return with_and_without(FuseGramMatrix(), capture_function(function, X, w=W))


@pytest.mark.parametrize("name", OWN)
def test_the_product_is_the_same_and_its_gradient_as_near(name):
    plain, ours, given, result = passed(OWN[name])
    assert [c.action for c in result.changes] == ["one gradient"]
    assert any(n.target is own_product for n in ours.graph.nodes)
    theirs, found = run_step(plain, given), run_step(ours, given)
    assert all(map(torch.equal, theirs.outputs, found.outputs)), "forward bit-exact"
    for one, other in zip(theirs.grads, found.grads, strict=True):
        assert (one - other).norm() <= 2**-7 * one.norm()


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_left_alone(name):
    assert not passed(OTHERS[name])[3].modified


def test_without_gradients_there_is_nothing_to_gain():
    with torch.no_grad():
        assert not passed(OWN["by mT"])[3].modified


def errors(function, x, grad):
    """How far the gradient is from fp64's, relative."""
    given = x.clone().requires_grad_()
    function(given.to(BF16)).backward(grad)
    wide = x.to(BF16).double().requires_grad_()
    (wide @ wide.mT).backward(grad.double())
    return float((given.grad - wide.grad).norm() / wide.grad.norm())


def test_errors_are_those_of_two_products():
    x, grad = torch.randn(64, 9, 64), torch.randn(64, 9, 9).to(BF16)
    lower = grad.tril(-1)
    for g in (grad, lower):
        assert errors(own_product, x, g) <= 1.1 * errors(lambda h: h @ h.mT, x, g)


def test_control_half_a_gradient_is_found_out(monkeypatch):
    monkeypatch.setattr(
        gram_matrix._OwnProduct, "backward", staticmethod(lambda ctx, grad: 2 * grad @ ctx.saved_tensors[0])
    )
    x, grad = torch.randn(64, 9, 64), torch.randn(64, 9, 9).to(BF16)
    assert errors(own_product, x, grad) > 1.1 * errors(lambda h: h @ h.mT, x, grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_every_mode_of_autograd():
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(own_product, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(own_product, x)
    torch.testing.assert_close(torch.vmap(own_product)(x), x @ x.mT)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        assert forward_ad.unpack_dual(own_product(dual)).tangent is not None


@pytest.mark.parametrize("policy", ["bf16", "bf16,skip=fuse_gram_matrix"])
def test_a_step_has_the_bits_of_the_loop(policy):
    found = []
    for whole in (False, True):
        model = Function(lambda s, x: torch.tril(OWN["by mT"](s, x), -1).flatten(1), w=W.clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        target = torch.zeros(4, 36)
        if whole:
            step = amp_graph.TrainStep(model, torch.nn.functional.mse_loss, optimizer, policy)
            found.append([step(X, target) for _ in range(3)])
            continue
        converted, losses = amp_graph.convert(model, policy), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(torch.nn.functional.mse_loss(converted(X), target))
            losses[-1].backward()
            optimizer.step()
        assert ("own_product" in amp_graph.report(converted).graphs[0].text) == (policy == "bf16")
        found.append([loss.detach() for loss in losses])
    assert all(map(torch.equal, *found))
