"""Small products in a kernel of our own: any layout and size, sums in fp32 rounded once; what does not fit stays."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear.fuse_addmm_bias import FuseAddmmBias
from amp_graph.passes.backends.inductor import lower_small_gemm
from amp_graph.passes.backends.inductor.lower_small_gemm import LowerSmallGemm
from amp_graph.passes.backends.inductor.small_gemm_template import NUMBERS, POINTERS, source_of
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.profitability import gemm_thresholds
from amp_graph.passes.torch_compat.fake import make_fx
from amp_graph.passes.torch_compat.onednn import linear_pointwise
from amp_graph.passes.torch_compat.versions import takes_kernels_of_ours

pytestmark = [
    pytest.mark.skipif(not takes_kernels_of_ours(), reason="Inductor's code generation before 2.13"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
BF16 = torch.bfloat16
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch):
    monkeypatch.setattr(gemm_thresholds, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(gemm_thresholds, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(gemm_thresholds, "multiplies_bf16", lambda: True)


def drawn(*shape, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# -- the kernel -------------------------------------------------------------------------------------------


DEFINES = {
    "vectors": "",
    "plain loops": "#define PLAIN_LOOPS\n",
    "without memory": "#include <stdlib.h>\nstatic void *none(...) { return 0; }\n#define aligned_alloc none\n",
}


@pytest.fixture(scope="module", params=DEFINES)
def kernel(request):
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding(
        [*POINTERS, *NUMBERS], DEFINES[request.param] + source_of("kernel")
    )


def multiplied(kernel, left, right, bias=None, relu=False):
    out = torch.full((left.shape[0], right.shape[1]), 7.0, dtype=BF16)
    numbers = [bias is not None, relu, *out.shape, left.shape[1], *left.stride(), *right.stride(), 0, 0, 0]
    kernel(left, right, left if bias is None else bias, out, *map(int, numbers))
    return out


def assert_rounded_once(found, left, right, bias=None, relu=False):
    """Compare with fp64: half a place of the result, and what fp32 loses of the terms."""
    exact, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    exact = exact if bias is None else exact + bias.double()
    exact = exact.relu() if relu else exact
    allowed = 0.501 * torch.finfo(BF16).eps * exact.abs() + left.shape[1] * torch.finfo(torch.float32).eps * terms
    assert ((found.double() - exact).abs() <= allowed).all()


SHAPES = [(32, 256, 256), (5, 33, 17), (1, 64, 2), (33, 70, 31), (3, 16, 1), (4, 1, 130), (130, 65, 64)]
LAYOUTS = list(itertools.product(("rows", "columns"), repeat=2))


def laid(rows, columns, how):
    return drawn(rows, columns) if how == "rows" else drawn(columns, rows).t()


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.compiled
def test_every_layout_is_multiplied_and_rounded_once(kernel, rows, columns, depth, layouts):
    left, right = laid(rows, depth, layouts[0]), laid(depth, columns, layouts[1])
    assert_rounded_once(multiplied(kernel, left, right), left, right)
    bias = drawn(columns)
    for relu in (False, True):
        assert_rounded_once(multiplied(kernel, left, right, bias, relu), left, right, bias, relu)


@pytest.mark.compiled
def test_rows_that_lie_apart_by_an_odd_number_of_elements(kernel):
    left, right = drawn(7, 21)[:, :16], drawn(16, 35)[:, :20]
    assert_rounded_once(multiplied(kernel, left, right), left, right)
    assert_rounded_once(multiplied(kernel, right.t(), left.t()), right.t(), left.t())


@pytest.mark.compiled
def test_elements_that_are_no_numbers_stay_where_they_belong(kernel):
    left, right = drawn(6, 16), drawn(16, 40)
    left[1, 3], left[4, 0] = float("nan"), float("inf")
    for relu in (False, True):
        found = multiplied(kernel, left, right, None, relu)
        wanted = left.float() @ right.float()
        wanted = wanted.relu() if relu else wanted
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
        assert torch.equal(found[0] > 0, wanted[0] > 0)


# -- the pass ---------------------------------------------------------------------------------------------


def passed(function, *given):
    """The graph of ``function`` after the passes, and how many products changed."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    _, done = run_passes(gm, [FuseAddmmBias(), LowerSmallGemm()], checked=True)
    return gm, len(done.result.changes)


X, W, B = drawn(6, 32), drawn(24, 32), drawn(24)


@pytest.mark.skipif(linear_pointwise is None, reason="needs oneDNN")
def test_products_and_linears_become_small_products():
    def function(x, w, b):
        return torch.mm(F.linear(x, w, b).relu(), w)

    gm, count = passed(function, X, W, B)
    assert count == 2
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == [ATEN.permute.default, OPS.small_product.default, OPS.small_product.default]
    assert gm.graph.find_nodes(op="call_function", target=OPS.small_product.default)[0].args[3] is True
    exact = F.linear(X.double(), W.double(), B.double()).relu() @ W.double()
    assert (gm(X, W, B).double() - exact).norm() <= 4e-3 * exact.norm()


LEFT = {
    "fp32": (torch.mm, (X.float(), W.t().float())),
    "many multiplications": (torch.mm, (drawn(512, 128), drawn(128, 512))),
    "a large result": (torch.mm, (drawn(1024, 1), drawn(1, 1024))),
    "elements with gaps": (torch.mm, (drawn(6, 64)[:, ::2], W.t())),
    "a batch": (torch.bmm, (X[None], W.t()[None])),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_the_kernel_does_not_take_stays(case):
    function, given = LEFT[case]
    gm, count = passed(function, *given)
    assert count == 0
    assert torch.equal(gm(*given), function(*given))


@pytest.mark.parametrize("lacks", ["bf16", "a version", "no matrix units"])
def test_other_machines_and_versions_keep_the_library(lacks, monkeypatch):
    monkeypatch.setattr(gemm_thresholds, "cpu_has_bf16", lambda: lacks != "bf16")
    monkeypatch.setattr(gemm_thresholds, "cpu_has_amx", lambda: lacks == "no matrix units")
    monkeypatch.setattr(lower_small_gemm, "takes_kernels_of_ours", lambda: lacks != "a version")
    assert passed(torch.mm, X, W.t())[1] == 0


def test_several_threads_leave_products_to_the_library_sooner():
    given, threads = (drawn(64, 256), drawn(256, 256)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert passed(torch.mm, *given)[1] == 1
        torch.set_num_threads(2)
        assert passed(torch.mm, *given)[1] == 0
        assert passed(torch.mm, X, W.t())[1] == 1
    finally:
        torch.set_num_threads(threads)


# -- through Inductor -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 24), nn.Linear(24, 16)

    def forward(self, x):
        wide = self.first(x).relu()
        return (self.second(wide[:, :24]) @ wide[1:9, 8:].t()).square().mean()  # a view that starts further on


def gradients(policy, compile):
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), policy, compile=compile)
    model(drawn(12, 32, dtype=torch.float32)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.onednn  # what the kernel is compared with has weights that oneDNN packs
@pytest.mark.parametrize("cpp_wrapper", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_code_calls_the_kernel_and_gradients_stay(cpp_wrapper):
    from torch._inductor.utils import run_and_get_code

    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False, cpp_wrapper=cpp_wrapper), caches:
        ours, codes = run_and_get_code(gradients, "bf16", "inductor")
    calls = [code.count("cpp_small_product_") for code in codes]
    assert len(calls) == 2, "forward and backward"
    assert all(count > 2 for count in calls), "defined, and called for each product"
    without = gradients("bf16,skip=lower_small_gemm", "inductor")
    for got, other, wanted in zip(ours, without, gradients("bf16-O0", "eager"), strict=True):
        assert (got - wanted).norm() <= 3e-2 * wanted.norm()
        assert (got - other).norm() <= 1e-2 * wanted.norm()
