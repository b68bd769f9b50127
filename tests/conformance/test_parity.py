"""With PyTorch's own list, every operation computes in the dtype that eager autocast gives it, one by one."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch

import amp_graph
from tests.corpus import CASES, make
from tests.measure import DtypeLog, compare

POLICY = "bf16,lists=autocast_cpu,keep_outputs=false"


@contextlib.contextmanager
def as_when_captured():
    """Let transformers take the branches that it takes while a model is captured: precision is compared, not them.

    There it does not look at masks, so that causal ones are made, and multiplies experts by an operator of its own.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    with mock.patch.object(masking_utils, "is_tracing", return_value=True):
        with mock.patch.object(moe, "is_torchdynamo_compiling", return_value=True):
            yield


def logs(name, policy=POLICY):
    """(log of autocast, log of ours) of one forward, on the same weights, inputs and random numbers."""
    model, args, kwargs = make(name)
    torch.manual_seed(5)
    with as_when_captured(), DtypeLog() as theirs, torch.autocast("cpu", torch.bfloat16):
        model(*args, **kwargs)
    model, args, kwargs = make(name)
    amp_graph.convert(model, policy)
    model(*args, **kwargs)  # captures; what it writes into is made anew
    _, args, kwargs = make(name)
    torch.manual_seed(5)
    with DtypeLog() as ours:
        model(*args, **kwargs)
    return theirs, ours


FUNCTION = (
    "a function of the user's own runs as it was captured, in fp32: custom_fwd asks for that under autocast alone"
)
MASKS = (
    "our kernel of attention reads a boolean mask otherwise than torch's, in both layers",
    Counter({"aten.scalar_tensor bfloat16 | -": 4, "aten.where bfloat16 | -": 2}),
)
# name: (reason, exactly what differs). Whatever else differs fails, and so does what no longer differs.
EXCEPTIONS = {
    "bloom": (
        FUNCTION,
        Counter({f"aten.{op} bfloat16 | float32": n for op, n in (("mul", 12), ("add", 4), ("tanh", 2))}),
    ),
    "custom_function": (FUNCTION, Counter({f"aten.{op} bfloat16 | float32": 1 for op in ("mul", "round", "div")})),
    "float64_part": ("to(x.dtype) is captured as a cast to fp32", Counter({"aten.add bfloat16 | float32": 1})),
    "mixtral_eager": MASKS,
    "mixtral_grouped": MASKS,
    "graph_break_logging": (
        "x.mean().item() is captured, as an operation",
        Counter({"- | aten.scalar_tensor float64": 1}),
    ),
    "graph_break_branch": (
        "the graph hands on fp32, as captured, to the code after its break, which divides by x.abs().max()",
        Counter({f"{op} bfloat16 | float32": 1 for op in ("aten.abs", "aten.max", "aten.div")}),
    ),
    "finfo_min_mask": (
        "full(dtype=scores.dtype) is captured as fp32, so the bias is: the scores beside it promote, up to the sum",
        Counter(
            {
                "aten.add bfloat16 | float32": 3,
                **{f"aten.{op} bfloat16 | float32": 1 for op in ("full", "triu", "clamp", "_softmax")},
            }
        ),
    ),
    "gcn": (
        "zeros and ones(dtype=x.dtype), in each of two layers, are captured as fp32, and so are the degrees and "
        "messages made of them",
        Counter(
            {
                **{f"aten.{op} bfloat16 | float32": 4 for op in ("index_add", "index", "mul")},
                **{f"aten.{op} bfloat16 | float32": 2 for op in ("zeros", "ones", "rsqrt", "zeros_like")},
            }
        ),
    ),
}
ELSEWHERE = {
    "gru_bidirectional": "test_a_gru_taken_apart",
    "gru_root": "test_a_gru_taken_apart",
    "cond": "test_cond",
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name", sorted(n for n, c in CASES.items() if "no_autocast" not in c.tags and n not in ELSEWHERE)
)
def test_every_operation_has_the_dtype_that_autocast_gives_it(name):
    _, expected = EXCEPTIONS.get(name, ("", Counter()))
    assert Counter(line.split(": ", 1)[1] for line in compare(*logs(name))) == expected  # without the places


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
    """Dispatch modes refuse the operator: the results are compared. Its bodies hand on captured dtypes, here fp32."""
    model, args, kwargs = make("cond")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(*args, **kwargs)
    model, args, kwargs = make("cond")
    amp_graph.convert(model, POLICY)
    ours = model(*args, **kwargs)
    assert (ours.dtype, theirs.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(ours, theirs.float())


def test_control_another_list_is_found():
    """Our own list keeps more in bf16 than autocast: the comparison must see that."""
    assert compare(*logs("bert_sdpa", "bf16,accuracy=fast"))
