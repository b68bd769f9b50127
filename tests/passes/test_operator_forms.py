"""Calls that are not what a pass expects: other functions around an operator, vectors, sparse operands, statistics.

Each ran into an error, or rounded what autocast keeps in fp32.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.relative_error import errors

FAST = "bf16,accuracy=fast"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@layers(lambda function, *layers: dict(function=function, layers=nn.ModuleList(layers)))
def Model(self, *given):
    return self.function(self.layers, *given)


def step(make, given, prepare=lambda model: model, low=None):
    """Output and gradients of one step, of a model that is always made the same."""
    torch.manual_seed(0)
    model, context = make(), torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None)
    prepare(model)
    return step_of(model, *given, loss=lambda out: out.float().sin().sum(), context=context)


def check(make, given, policy):
    exact = step(make, given)
    try:
        bounds = [1.5 * e + 0.01 for e in errors(step(make, given, low=LOW[policy[:4]]), exact)]
    except (RuntimeError, NotImplementedError):  # autocast fails where ours must not
        bounds = [0.03] * len(exact)
    found = step(make, given, lambda model: amp_graph.convert(model, policy))
    assert [(f.dtype, f.shape) for f in found] == [(t.dtype, t.shape) for t in exact]
    found = errors(found, exact)
    scale = 2.2 if "fast" in policy else 1.0
    assert all(e <= scale * b for e, b in zip(found, bounds, strict=True)), (found, bounds)


V, W, A = drawn(64), drawn(64, seed=1), drawn(64, 64)
T, U = drawn(2, 3, 8), drawn(2, 3, 8, seed=1)
# They come to no matrix product: autocast, which sees what they call, leaves them in fp32.
NO_PRODUCTS = {
    "inner": lambda: torch.inner(V, W),
    "inner of a number": lambda: torch.inner(V[0], W),
    "dot": lambda: torch.dot(V, W),
    "tensordot of vectors": lambda: torch.tensordot(V, W, 1),
    "tensordot of all": lambda: torch.tensordot(T, U, 3),
    "einsum of rows": lambda: torch.einsum("ij,ij->ij", A, A),
    "einsum, outer": lambda: torch.einsum("i,j->ij", V, W),
    "einsum, turned": lambda: torch.einsum("ij->ji", A),
    "einsum, trace": lambda: torch.einsum("ii->", A),
    "one matrix of a chain": lambda: torch.chain_matmul(A),
}
PRODUCTS = {
    "inner of matrices": lambda: torch.inner(A, A),
    "einsum of matrices": lambda: torch.einsum("ij,kj->ik", A, A),
    "tensordot of matrices": lambda: torch.tensordot(A, A, 1),
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")
@pytest.mark.parametrize("name", [*NO_PRODUCTS, *PRODUCTS])
def test_a_product_by_name_is_low_where_it_is_one(name):
    function = (NO_PRODUCTS | PRODUCTS)[name]
    exact = function()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = function()
    assert theirs.dtype == (torch.float32 if name in NO_PRODUCTS else torch.bfloat16)
    found = amp_graph.convert(Model(lambda _: function()), "bf16")()
    if name in NO_PRODUCTS:
        assert torch.equal(found, exact)
    else:
        assert torch.equal(found, theirs.float())


def test_a_list_of_the_users_may_call_it_a_product():
    model = amp_graph.convert(Model(lambda _: torch.inner(V, W)), "bf16,allow=aten.inner")
    assert not torch.equal(model(), torch.inner(V, W))


conv = partial(nn.Conv2d, 3, 8, 3, padding=1)


def norm(function):
    """A norm whose result and statistics feed linears."""

    def run(layers, x):
        out, mean, spread = function(layers[0](x), layers[1].weight, layers[1].bias)
        return layers[2](out) + layers[3](mean.reshape(-1)[:3]) + layers[3](spread.reshape(-1)[:3])

    return lambda: Model(run, nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.Linear(3, 4))


def computed(function):
    """A norm in fp32 whose parameters are computed by a linear."""

    def run(layers, x):
        parameters = layers[0](x)
        return function(torch.cat([x, x], 1).exp(), parameters[0], parameters[1])

    return lambda: Model(run, nn.Linear(8, 16))


IMAGES, ROWS, VECTOR = (drawn(2, 3, 9, 9),), (drawn(3, 8),), (drawn(8),)
FORMS = {
    "area": (lambda: Model(lambda m, x: F.interpolate(m[0](x), size=(3, 3), mode="area"), conv()), IMAGES),
    "area of one": (lambda: Model(lambda m, x: F.interpolate(m[0](x), 1, None, "area"), conv()), IMAGES),
    "area by a factor": (lambda: Model(lambda m, x: F.interpolate(m[0](x), None, 0.4, "area"), conv()), IMAGES),
    "linear with a vector": (
        lambda: Model(lambda m, x: F.linear(m[0](x), m[1].weight[0]), nn.Linear(8, 16), nn.Linear(16, 1)), ROWS,
    ),
    "linear of vectors": (
        lambda: Model(lambda m, x: F.linear(m[0](x), m[1].weight[0]), nn.Linear(8, 16), nn.Linear(16, 1)), VECTOR,
    ),
    "layer norm of a vector": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)), VECTOR,
    ),
    "sum and norm of a vector": (
        lambda: Model(
            lambda m, x: m[2](m[1](x + m[0](x))), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4),
        ), VECTOR,
    ),
    "safe softmax": (
        lambda: Model(lambda m, x: torch.ops.aten._safe_softmax(m[0](x), -1), nn.Linear(8, 16)), ROWS,
    ),
    "layer norm's statistics": (norm(lambda h, w, b: torch.native_layer_norm(h, (16,), w, b, 1e-5)), ROWS),
    "group norm's statistics": (norm(lambda h, w, b: torch.native_group_norm(h, w, b, 3, 16, 1, 4, 1e-5)), ROWS),
    "batch norm's statistics": (
        norm(lambda h, w, b: torch.native_batch_norm(h, w, b, None, None, True, 0.1, 1e-5)), ROWS,
    ),
    "computed layer norm": (computed(lambda h, w, b: F.layer_norm(h, (16,), w, b)), ROWS),
    "computed group norm": (computed(lambda h, w, b: F.group_norm(h, 4, w, b)), ROWS),
    "computed batch norm": (computed(lambda h, w, b: F.batch_norm(h, None, None, w, b, True)), ROWS),
}  # fmt: skip


# fp16, and "fast" where statistics are low under it alone, else left to the long sweeps.
CASES = [
    *(pytest.param(name, "bf16") for name in FORMS),
    *(pytest.param(n, "fp16", marks=() if n == "safe softmax" else pytest.mark.slow) for n in FORMS),
    *(pytest.param(n, FAST, marks=() if "statistics" in n else pytest.mark.slow) for n in FORMS),
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_as_exact_as_autocast(name, policy):
    check(*FORMS[name], policy)


@torch._dynamo.allow_in_graph
def turned_linear(weight, x):
    return F.linear(x, weight)


@torch._dynamo.allow_in_graph
def activated(x, _):
    return F.gelu(x)


FOREIGN = {
    "linear": lambda m, x: turned_linear(m[1].weight, turned_linear(m[0].weight, x)),
    "reflected": lambda m, x: m[1].weight.t().__rmatmul__(m[0](x)),
    "gelu": lambda m, x: m[1](activated(m[0](x), 2)),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("train", [True, False])
def test_functions_that_order_their_arguments_otherwise(name, train):
    """Evaluated too, where weights are packed by what a product is given."""
    make = lambda: Model(FOREIGN[name], nn.Linear(256, 256), nn.Linear(256, 256))  # noqa: E731
    x = drawn(64, 256)
    if train:
        check(make, (x,), "bf16")
    else:
        model = make().eval()
        with torch.no_grad():
            exact = model(x)
            assert errors([amp_graph.convert(model, "bf16")(x)], [exact])[0] < 0.02


def adjacency(layout):
    dense = torch.eye(3) + torch.ones(3, 3).tril()
    return {"csr": dense.to_sparse_csr, "coo": dense.to_sparse, "csc": dense.to_sparse_csc}[layout]()


PLACES = [[0, 1, 2], [1, 2, 0]]
SPARSE = {
    "given": lambda m, x, a: a @ m[0](x),
    "by its function": lambda m, x, a: torch.sparse.mm(a, m[0](x)),
    "added": lambda m, x, a: torch.addmm(m[0](x), a, m[0](x)),
    "made inside": lambda m, x, a: torch.sparse.mm(
        torch.sparse_coo_tensor(torch.tensor(PLACES), torch.ones(3), (3, 3), check_invariants=True), m[0](x)
    ),
    "of what was low": lambda m, x, a: m[0](x).to_sparse() @ m[0](x).t(),
    "softmax": lambda m, x, a: torch.sparse.softmax(m[0](x).to_sparse(), 1).to_dense() @ m[0](x).t(),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # 2.11, 2.12
@pytest.mark.filterwarnings("ignore:amp_graph. Model. :amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((n, "csr") for n in SPARSE),
        *((n, how) for n in ("given", "by its function", "added") for how in ("coo", "csc")),
    ],
)
def test_sparse_operands_stay_in_fp32(name, layout):
    """Dynamo captures none, and autocast casts what their kernels take in fp32 alone."""
    given = (drawn(3, 8), adjacency(layout))
    check(lambda: Model(SPARSE[name], nn.Linear(8, 16)), given, "bf16")
    model = amp_graph.convert(Model(SPARSE[name], nn.Linear(8, 16)), "bf16")
    for _ in range(3):  # calls without a graph run under autocast from the second one on
        out = model(*given)
        out.sum().backward()
    assert out.dtype == torch.float32
    assert "sparse" in amp_graph.report(model).text().casefold()
