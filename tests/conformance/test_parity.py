"""With PyTorch's own list, every operation computes in the dtype that eager autocast gives it, one by one."""

from collections import Counter

import pytest
import torch

import amp_graph
from tests.corpus import CASES, make
from tests.measure import DtypeLog, compare

POLICY = "bf16,lists=autocast_cpu,keep_outputs=false"
BF16, FULL = "bfloat16", "float32"
PRODUCTS = {"aten.addmm", "aten.mm", "aten.bmm", "aten.convolution"}


def logs(name):
    """(log of autocast, log of ours) of one forward, on the same weights, inputs and random numbers."""
    model, args, kwargs = make(name)
    torch.manual_seed(5)
    with DtypeLog() as theirs, torch.autocast("cpu", torch.bfloat16):
        model(*args, **kwargs)
    model, args, kwargs = make(name)
    amp_graph.convert(model, POLICY)
    model(*args, **kwargs)  # captures; what it writes into is made anew
    _, args, kwargs = make(name)
    torch.manual_seed(5)
    with DtypeLog() as ours:
        model(*args, **kwargs)
    return theirs, ours


def differences(name):
    """What `compare` says, without the places: "aten.gelu bfloat16 | float32"."""
    return Counter(line.split(": ", 1)[1] for line in compare(*logs(name)))


def extra(**operations):
    """Operations that only ours runs, each as often as said."""
    return Counter({f"- | aten.{op} {dtype}": n for op, (dtype, n) in operations.items()})


def fuller(**operations):
    """Operations that autocast runs in bf16 and ours in fp32, each as often as said."""
    return Counter({f"aten.{op} {BF16} | {FULL}": n for op, n in operations.items()})


MASK = "capture has the library build its causal mask, where eager leaves it to the attention kernel"
READS = "the user's code reads x.dtype, which capture resolved to fp32: what is made of it is full precision"

# name: (reason, exactly what differs). Whatever else differs fails, and so does what no longer differs.
EXCEPTIONS = {
    "gpt2": (MASK, extra(scalar_tensor=(BF16, 4), where=(BF16, 2))),
    "llama_gqa": (MASK, extra(scalar_tensor=(BF16, 4), where=(BF16, 2))),
    "mixtral_eager": (MASK, extra(scalar_tensor=(BF16, 4), where=(BF16, 2))),
    "mixtral_grouped": (
        MASK + "; and it takes another implementation of the grouped product, in fp32 as autocast's is",
        extra(scalar_tensor=(BF16, 4), where=(BF16, 2))
        + Counter({"aten._grouped_mm float32 | -": 4, "- | transformers.grouped_mm_fallback float32": 4}),
    ),
    "whisper": (MASK, extra(scalar_tensor=(BF16, 2), where=(BF16, 1))),
    "gcn": (READS, fuller(zeros=2, ones=2, index_add=4, rsqrt=2, index=4, mul=4)),
    "t5": (READS, fuller(zeros=1)),
    "finfo_min_mask": (READS, fuller(full=1, triu=1, add=3, clamp=1, _softmax=1)),
    "float64_part": (READS, fuller(add=1)),
    "graph_break_logging": ("x.mean().item() is captured, as an operation", extra(scalar_tensor=("float64", 1))),
    "custom_function": (
        "a custom autograd.Function runs as it was captured, in fp32",
        fuller(mul=1, round=1, div=1),
    ),
}  # fmt: skip
ELSEWHERE = {
    "gru_bidirectional": "test_a_gru_taken_apart",
    "gru_root": "test_a_gru_taken_apart",
    "cond": "test_cond",
}


@pytest.mark.parametrize(
    "name", sorted(n for n, c in CASES.items() if "no_autocast" not in c.tags and n not in ELSEWHERE)
)
def test_every_operation_has_the_dtype_that_autocast_gives_it(name):
    _, expected = EXCEPTIONS.get(name, ("", Counter()))
    assert differences(name) == expected


def test_no_exception_is_stale():
    assert EXCEPTIONS.keys() | ELSEWHERE.keys() <= CASES.keys()
    assert all(reason and expected for reason, expected in EXCEPTIONS.values())


# Operations that only move values, of which the two ways to write a GRU use different ones.
GRU_MOVES = {"aten.unsafe_split", "aten.stack", "aten.cat", "aten.flip", "aten.transpose_"}


@pytest.mark.parametrize("name", ["gru_bidirectional", "gru_root"])
def test_a_gru_taken_apart(name):
    """Capture takes a GRU apart in Python, out of place: the same computations, under other names."""
    theirs, ours = (
        Counter((op.rstrip("_"), dtypes) for op, dtypes in log.entries if op not in GRU_MOVES) for log in logs(name)
    )
    assert ours == theirs
    assert sum(n for (op, _), n in ours.items() if op == "aten.addmm") >= 7


def test_cond():
    """Dispatch modes refuse the operator: its branches are read from the graph, its result is compared."""
    model, args, kwargs = make("cond")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(*args, **kwargs)
    model, args, kwargs = make("cond")
    amp_graph.convert(model, POLICY)
    ours = model(*args, **kwargs)
    (graph,) = amp_graph.report(model).graphs
    linears = [n.precision for n in graph.operations if n.ops == ("aten.linear",)]
    assert linears == ["low"] * 5
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2)


def test_control_another_list_is_found():
    """Our own list keeps more in bf16 than autocast: the comparison must see that."""
    model, args, kwargs = make("bert_sdpa")
    with DtypeLog() as theirs, torch.autocast("cpu", torch.bfloat16):
        model(*args, **kwargs)
    amp_graph.convert(model, "bf16,accuracy=fast")
    model(*args, **kwargs)
    with DtypeLog() as ours:
        model(*args, **kwargs)
    assert compare(theirs, ours)
