"""Einstein sums of two operands become products that lie as they did; other sums stay."""

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.backends.cpu.attention.attention_kernel import library
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.recognize.einsum_to_matmul import EinsumToMatmul
from tests.passes.graphs import Function, capture_function, options

SIZES = {"b": 3, "h": 2, "i": 5, "j": 7, "d": 8, "l": 6, "o": 4, "k": 2}
PRODUCTS = (
    "b h i d, b h j d -> b h i j",
    "bhij,bhjd->bhid",
    "bij,bjd->bid",
    "bid,bjd->bij",
    "bct,bcs->bts",
    "bts,bcs->bct",
    "bhid,bhjd->bhji",
    "ibhd,jbhd->bhij",
    "bij,bdj->dbi",
    "ij,jd->id",
    "ji,jd->di",
    "bld,od->blo",
    "bld,do->blo",
    "bld,od->lbo",
    "bhld,od->bhlo",
    "... i d, ... j d -> ... i j",
    "...d,od->...o",
)
OTHERS = {
    "a sum of what one has alone": "bij,jd->id",
    "an outer product": "i,j->ij",
    "elements": "bi,bi->bi",
    "two indices": "bhij,bhij->b",
    "a vector": "bij,j->bi",
    "a diagonal": "ii,ij->ij",
    "several of both": "bild,jod->bilj",
    "columns of two": "bld,dhk->blhk",
    "no result said": "ij,jd",
    "dimensions to sum over": "...ij,...jd->id",
}
SIZES |= {"c": 8, "t": 5, "s": 7}


def drawn(equation, **sizes):
    terms = equation.replace(" ", "").replace("...", "b").partition("->")[0].split(",")
    generator = torch.Generator().manual_seed(0)
    return [torch.randn([(SIZES | sizes)[i] for i in term if i.isalpha()], generator=generator) for term in terms]


def through_the_pass(function, *given):
    gm, done = capture_function(function, *given).through([IdentifyOps(), EinsumToMatmul(options())])
    return gm, done[-1].result.changes


def targets(gm):
    return [getattr(n.target, "__name__", "") for n in gm.graph.nodes if n.op == "call_function"]


def gradients(function, given):
    leaves = [t.clone().requires_grad_() for t in given]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("equation", PRODUCTS)
def test_a_sum_is_the_product_and_lies_as_it_did(equation, turned):
    given = [t.mT.contiguous().mT if turned else t for t in drawn(equation)]
    gm, changes = through_the_pass(lambda s, a, b: torch.einsum(equation, a, b), *given)
    assert len(changes) == 1
    assert "einsum" not in targets(gm)
    assert targets(gm).count("matmul") == 1
    found, wanted = gradients(gm, given), gradients(lambda a, b: torch.einsum(equation, a, b), given)
    assert found[0].stride() == wanted[0].stride()
    torch.testing.assert_close(list(found), list(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_stays(name):
    equation = OTHERS[name]
    gm, changes = through_the_pass(lambda s, a, b: torch.einsum(equation, a, b), *drawn(equation))
    assert not changes
    assert "einsum" in targets(gm)


def test_operands_that_are_spread_or_three_stay():
    spread = [torch.randn(3, 5, 7), torch.randn(1, 7, 8)]
    assert not through_the_pass(lambda s, a, b: torch.einsum("bij,bjd->bid", a, b), *spread)[1]
    three = drawn("ij,jd,dl->il")
    assert not through_the_pass(lambda s, a, b, c: torch.einsum("ij,jd,dl->il", a, b, c), *three)[1]


def test_operands_in_a_list_are_operands():
    given = drawn("bij,bjd->bid")
    assert len(through_the_pass(lambda s, a, b: torch.einsum("bij,bjd->bid", [a, b]), *given)[1]) == 1


def test_control_a_result_that_would_lie_otherwise_stays(monkeypatch):
    """Its view would fail: what the pass asks of strides is what keeps it from that."""

    def flat(s, a, b):
        return torch.einsum("bit,bsi->bst", a, b).view(3, -1)

    given = [torch.randn(3, 5, 4), torch.randn(3, 7, 5)]
    gm, changes = through_the_pass(flat, *given)
    assert len(changes) == 1
    assert torch.allclose(gm(*given)[0], flat(None, *given), atol=1e-5)
    monkeypatch.setattr("amp_graph.passes.recognize.einsum_to_matmul._form", lambda made: ())
    otherwise, _ = through_the_pass(flat, *given)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        otherwise(*given)


def stepped(function, policy):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 12, 8)
    model = amp_graph.convert(Function(function, w=torch.randn(16, 8) / 3), policy)
    out = model(x, x.flip(2), x.roll(1, 2))
    out.square().mean().backward()
    return out, model.w.grad, [n.target for g in conversion_of(model).graphs for n in g.rewritten.gm.graph.nodes]


def attention(s, q, k, v):
    """That of CompVis' latent diffusion, and a linear."""
    q = torch.einsum("bhid,od->bhio", q, s.w)[..., :8]
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.35
    return torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v)


@pytest.mark.skipif(library() is None, reason="needs AVX512_BF16 and a C compiler")
def test_attention_of_sums_is_our_kernel_and_as_exact():
    fused, written_out = stepped(attention, "bf16"), stepped(attention, "bf16,skip=einsum_to_matmul")
    assert attention_low in fused[2]
    assert attention_low not in written_out[2]
    exact = stepped(attention, "bf16-O0")
    for ours, theirs, right in zip(fused[:2], written_out[:2], exact[:2], strict=True):
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


def test_who_wants_fp32_of_sums_gets_it():
    def of_sums(s, q, k, v):
        return torch.einsum("bhid,od->bhio", q, s.w)

    exact, low = stepped(of_sums, "bf16-O0")[0], stepped(of_sums, "bf16")[0]
    assert not torch.allclose(low, exact, atol=1e-5)
    for policy in ("bf16,deny=aten.einsum", "bf16,keep_fp32=.*"):
        assert torch.allclose(stepped(of_sums, policy)[0], exact, atol=1e-5)
