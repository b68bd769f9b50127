"""Products with a turned parameter become linears of the same bits; other products stay."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.passes.graphs import Function, capture_function, rewritten

X = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
W = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)) / 4
B = torch.randn(12, generator=torch.Generator().manual_seed(2))

PLAIN = {
    ".T": lambda s, x: x @ s.w.T,
    "t()": lambda s, x: torch.matmul(x, s.w.t()),
    "mT": lambda s, x: torch.matmul(x, s.w.mT),
    "transpose": lambda s, x: x.matmul(s.w.transpose(0, 1)),
    "permute": lambda s, x: x @ s.w.permute(1, 0),
    "swapaxes": lambda s, x: x @ s.w.swapaxes(0, 1),
    "swapdims": lambda s, x: x @ torch.swapdims(s.w, -1, 0),
    "movedim": lambda s, x: x @ s.w.movedim(0, 1),
    "moveaxis": lambda s, x: x @ torch.moveaxis(s.w, 1, 0),
    "rows": lambda s, x: torch.mm(x[0], s.w.t())[None],
    "turned for another one, too": lambda s, x: (x @ (turned := s.w.t())) * turned.sum(),
}
OTHERS = {
    "not turned": lambda s, x: x @ s.square,
    "of what was computed": lambda s, x: x @ (s.w * 2).T,
    "a vector": lambda s, x: x[0, 0] @ s.w.T,
    "turned on the left": lambda s, x: s.w @ x[0].T,
    "of three dimensions": lambda s, x: x @ s.w[None].expand(3, -1, -1).mT,
    "turned and copied": lambda s, x: x @ s.square.T.contiguous(),
}


def passed(function, policy="bf16"):
    model = amp_graph.convert(Function(function, w=W.clone(), b=B.clone(), square=torch.eye(16)), policy)
    out = model(X)
    out.float().square().sum().backward()
    nodes = [n for graph in conversion_of(model).graphs for n in graph.rewritten.gm.graph.nodes]
    linears = sum("linear" in getattr(n.target, "__name__", "") for n in nodes)
    return [out.detach(), model.w.grad, model.b.grad], linears


@pytest.mark.parametrize("name", PLAIN)
def test_a_product_is_a_linear_of_the_same_bits(name):
    found, linears = passed(PLAIN[name], "bf16,skip=lower_linears")
    plain, none = passed(PLAIN[name], "bf16,skip=matmul_to_linear")
    assert (linears, none) == (1, 0)
    assert torch.equal(found[0], plain[0])
    assert torch.allclose(found[1], plain[1], rtol=2e-2, atol=2e-2)


def test_a_bias_stays_an_addition_which_makes_fp32():
    found, linears = passed(lambda s, x: x @ s.w.T + s.b)
    plain, _ = passed(lambda s, x: x @ s.w.T + s.b, "bf16,skip=matmul_to_linear")
    assert linears == 1
    assert torch.equal(found[0], plain[0])
    assert not torch.equal(found[0], found[0].bfloat16().float())


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_stays(name):
    found, linears = passed(OTHERS[name])
    plain, _ = passed(OTHERS[name], "bf16,skip=matmul_to_linear")
    assert linears == 0
    assert torch.equal(found[0], plain[0])


def test_who_wants_fp32_of_linears_or_of_products_gets_it():
    def product(s, x):
        return x @ s.w.T

    for policy in ("bf16,deny=aten.matmul", "bf16,keep_fp32=.*"):
        out = passed(product, policy)[0][0]
        assert torch.allclose(out, F.linear(X, W), atol=1e-5)
    assert passed(product, "bf16,deny=aten.linear")[1] == 0


def test_a_graph_that_is_rewritten_computes_the_same():
    captured = capture_function(PLAIN[".T"], X, w=W)
    out = rewritten(captured)(*captured.given)[0]
    assert (out - X @ W.T).norm() <= 0.02 * out.norm()
