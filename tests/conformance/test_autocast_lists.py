"""PyTorch's own test tables of autocast, entry by entry: the installed `autocast_test_lists.py`.

CPU entries run, converted and under autocast. CUDA entries are decided from the list alone, on a graph of
one node: their dtypes need no GPU.
"""

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

import amp_graph
from amp_graph.lists import load
from tests.layers import layers
from tests.measure import DtypeLog

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

CPU, CUDA = AutocastCPUTestLists("cpu"), AutocastTestLists("cpu")
CPU_GROUPS = ("torch_expect_builtin_promote", "methods_expect_builtin_promote", "torch_16", "torch_fp32",
              "nn_16", "nn_fp32", "torch_need_autocast_promote")  # fmt: skip
CUDA_GROUPS = {
    "torch_fp16": "low",
    "linalg_fp16": "low",
    "nn_fp16": "low",
    "methods_fp16": "low",
    "torch_fp32": "full",
    "nn_fp32": "full",
    "methods_fp32": "full",
    "torch_need_autocast_promote": "promote",
    "torch_expect_builtin_promote": "promote",
    "methods_expect_builtin_promote": "promote",
}


def function_of(name):
    """The operation as a function; comparison and arithmetic methods as the operator that calls them."""
    if hasattr(operator, name) and name.startswith("__"):
        return getattr(operator, name.strip("_"))
    for home in (torch, torch._C._nn, torch._C._linalg, torch.nn.functional, torch.Tensor):
        if hasattr(home, name):
            return getattr(home, name)
    return None


HALVES = (torch.float16, torch.bfloat16)


def low(x, one):
    """A product with 1: what a layer before the operation returns, exact, and in 16 bits under autocast."""
    return F.linear(x.unsqueeze(-1), one).squeeze(-1)


@layers(
    lambda function, kwargs, halves: dict(
        function=function, kwargs=kwargs, halves=halves, one=nn.Parameter(torch.ones(1, 1))
    )
)
def Call(self, *args):
    """One operation as a module. Half-precision operands of an entry come from a layer before it."""
    leaves, spec = torch.utils._pytree.tree_flatten(args)
    leaves = [low(x, self.one) if i in self.halves else x for i, x in enumerate(leaves)]
    return self.function(*torch.utils._pytree.tree_unflatten(leaves, spec), **self.kwargs)


# -- CPU: run ------------------------------------------------------------------------------------------


def cpu_entries():
    for group in CPU_GROUPS:
        for index, entry in enumerate(getattr(CPU, group)):
            yield pytest.param(group, index, id=f"{group}-{index}-{entry[0]}")


def built(group, index):
    """(build, args): the entry as a module on fp32 inputs; what the entry has in half is made low inside."""
    name, args, *rest = getattr(CPU, group)[index]
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    leaves = torch.utils._pytree.tree_leaves(args)
    halves = {i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dtype in HALVES}
    return lambda: Call(function_of(name), kwargs, halves), raised(args)


def outputs(result):
    return [t.dtype for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def raised(obj):
    """The same inputs as a graph captured in fp32 has them."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in HALVES else t, obj)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("group", "index"), [*cpu_entries()])
def test_cpu_entries_return_what_autocast_returns(group, index):
    build, args = built(group, index)
    plain, model = build(), build()
    with torch.autocast("cpu", torch.bfloat16), DtypeLog() as theirs:
        wanted = plain(*args)
    amp_graph.convert(model, "bf16,lists=autocast_cpu,keep_outputs=false")
    got = model(*args)
    with DtypeLog() as ours:
        model(*args)
    assert outputs(got) == outputs(wanted)
    assert ours.entries == theirs.entries
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, wanted)), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_half_precision_inputs_are_the_users_own_but_where_autocast_is_reproduced():
    """Where it is an *input* that is bf16, autocast raises it; our own lists keep what was captured."""
    x, y = (torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.mse_loss(x, y)
    assert theirs.dtype == torch.float32
    ours, same = (
        amp_graph.convert(Call(F.mse_loss, {}, ()), f"bf16,keep_outputs=false{lists}")
        for lists in ("", ",lists=autocast_cpu")
    )
    assert torch.equal(ours(x, y), F.mse_loss(x, y))
    assert torch.equal(same(x, y), theirs)
    kept = amp_graph.convert(Call(F.mse_loss, {}, ()), "bf16,lists=autocast_cpu")
    assert torch.equal(kept(x, y), theirs.bfloat16())


def test_all_cpu_entries_are_run():
    assert len([*cpu_entries()]) == sum(len(getattr(CPU, group)) for group in CPU_GROUPS) == 55
    groups = {n for n, v in vars(CPU).items() if isinstance(v, list)}
    assert groups == set(CPU_GROUPS), "PyTorch has a table that is not looked at here"


# -- CUDA: decide --------------------------------------------------------------------------------------

# name: why no graph of one node can be made of the entry on CPU.
CUDA_UNBUILT = {
    "einsum": "its operands stand in the place of the flag that skips it: PyTorch never runs it either",
    "cudnn_convolution": "needs cuDNN, on fake tensors too",
    "cudnn_convolution_transpose": "needs cuDNN, on fake tensors too",
    "equal": "returns a Python bool",
}


def cuda_entries():
    for group in CUDA_GROUPS:
        for index, entry in enumerate(getattr(CUDA, group)):
            if entry[0] not in CUDA_UNBUILT:
                yield pytest.param(group, index, id=f"{group}-{index}-{entry[0]}")


def decided(function, args, kwargs):
    """The mark of one node, in a graph where tensors that an entry gives in half come from a cast.

    A graph is captured in fp32; an entry's fp16 inputs are what an earlier matrix product would return.
    """
    graph, examples = Graph(), []

    def as_node(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(examples)}")
        examples.append(leaf)
        return node

    graph.output(graph.call_function(function, *torch.utils._pytree.tree_map(as_node, (args, kwargs))))
    gm = amp_graph.rewrite(
        GraphModule(nn.Module(), graph),
        amp_graph.Policy("fp16", lists=("autocast_cuda",), device="cuda", keep_outputs=False),
        examples,
    )
    return gm, [n for n in gm.graph.nodes if n.op == "call_function" and "amp" in n.meta]


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying:UserWarning")
@pytest.mark.parametrize(("group", "index"), [*cuda_entries()])
def test_cuda_entries_are_decided_as_their_table_says(group, index):
    name, args, *rest = getattr(CUDA, group)[index]
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    wanted = CUDA_GROUPS[group]
    gm, calls = decided(function_of(name), raised(args), kwargs)
    marks = [n.meta["amp"] for n in calls]
    assert marks, gm.code
    if wanted == "low":
        assert {m.precision for m in marks if m.cls == "allow"} == {"low"}
        assert any(m.cls == "allow" for m in marks)
    elif wanted == "full":
        assert {m.precision for m in marks} <= {"full", "captured"}
        assert any(m.cls == "deny" for m in marks)
    else:
        assert all(m.cls in ("promote", "follow") for m in marks)


MIXED = {
    "cat": (torch.cat, lambda low, x: [[low, x]]),
    "cat, fp32 first": (torch.cat, lambda low, x: [[x, low]]),
    "stack": (torch.stack, lambda low, x: [[low, x]]),
    "stack, fp32 first": (torch.stack, lambda low, x: [[x, low]]),
    **{op.__name__: (op, lambda low, x: [low, x]) for op in (operator.add, operator.mul, operator.truediv)},
    "torch.add": (torch.add, lambda low, x: [low, x]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_operands_promote(name):
    """fp16 from a matrix product beside fp32: the widest wins, in both orders."""
    op, arguments = MIXED[name]
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    graph.output(graph.call_function(op, tuple(arguments(graph.call_function(torch.mm, (x, w)), x))))
    policy = amp_graph.Policy("fp16", lists=("autocast_cuda",), device="cuda", keep_outputs=False)
    gm = amp_graph.rewrite(GraphModule(nn.Module(), graph), policy, (torch.randn(8, 8), torch.randn(8, 8)))
    product, joined = (n for n in gm.graph.nodes if n.target in (torch.mm, op))
    assert product.meta["val"].dtype == torch.float16
    assert joined.meta["val"].dtype == torch.float32


def test_the_banned_entry_is_refused_by_the_list():
    """`binary_cross_entropy` raises under autocast on CUDA; the list says so."""
    assert [e[0] for e in CUDA.banned] == ["binary_cross_entropy"]
    rules = load("autocast_cuda", dtype="float16", device="cuda")
    assert rules.lookup(torch.ops.aten.binary_cross_entropy.default, {}).policy == "banned"


def test_all_cuda_entries_are_counted():
    entries = [e[0] for group in CUDA_GROUPS for e in getattr(CUDA, group)]
    left_out = [n for n in entries if n in CUDA_UNBUILT]
    assert set(left_out) == set(CUDA_UNBUILT)
    assert len(entries) - len(left_out) == len([*cuda_entries()])
    groups = {n for n, v in vars(CUDA).items() if isinstance(v, list)}
    assert groups == {*CUDA_GROUPS, "banned"}, "PyTorch has a table that is not looked at here"
