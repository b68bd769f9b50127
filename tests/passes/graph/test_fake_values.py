"""Values that are computed on the meta device, and those of casts, are the fake mode's own, layouts and errors too."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

import amp_graph
from amp_graph.passes.casts import insert_casts
from amp_graph.passes.graph import fake_values
from amp_graph.passes.graph.edit import give_value, set_identity
from amp_graph.passes.graph.fake_values import in_other_dtype, run_node, tensors, value
from amp_graph.passes.torch_compat.fake import FakeTensorMode, tracing_fake
from amp_graph.passes.torch_compat.storage import storage_key
from tests.corpus import CASES, make

BF16, LAST = torch.bfloat16, torch.channels_last
IMAGES = {
    "contiguous": lambda d: torch.empty(2, 6, 5, 7, dtype=d),
    "channels_last": lambda d: torch.empty(2, 6, 5, 7, dtype=d).to(memory_format=LAST),
    "one channel": lambda d: torch.empty(2, 1, 5, 7, dtype=d).to(memory_format=LAST),
    "one place": lambda d: torch.empty(2, 6, 1, 1, dtype=d),
    "with gaps": lambda d: torch.empty(2, 6, 5, 14, dtype=d)[..., ::2],
    "expanded": lambda d: torch.empty(1, 6, 1, 7, dtype=d).expand(2, 6, 5, 7),
    "rows": lambda d: torch.empty(4, 6, dtype=d),
    "lines": lambda d: torch.empty(4, 6, 9, dtype=d).transpose(0, 2).contiguous().transpose(0, 2),
}


def layout_of(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def norm_of(mode, image, training, affine, dtype):
    """A node of a batch norm over fake values, and the call itself."""
    with mode:
        x = IMAGES[image](dtype)
        scale, shift, mean, var = (torch.empty(x.shape[1]) for _ in range(4))
    graph = Graph()
    given = [x, mean, var, *((scale, shift) if affine else ())]
    nodes = [graph.placeholder(f"x{i}") for i in range(len(given))]
    for node, val in zip(nodes, given, strict=True):
        node.meta["val"] = val
    kwargs = dict(zip(("weight", "bias"), nodes[3:], strict=False)) | {"training": training}
    node = graph.call_function(F.batch_norm, tuple(nodes[:3]), kwargs)
    return node, lambda: F.batch_norm(x, mean, var, *((scale, shift) if affine else (None, None)), training)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("training", "affine"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("image", IMAGES)
def test_a_batch_norm_has_the_value_that_the_fake_mode_finds(image, training, affine, dtype):
    mode = FakeTensorMode()
    node, call = norm_of(mode, image, training, affine, dtype)
    with tracing_fake(mode, symbolic=False), torch.no_grad():
        expected = call()
    for _ in range(2):  # the second time from memory
        found = run_node(node, mode)
        assert layout_of(found) == layout_of(expected)
        assert type(found) is type(expected)
        assert found.fake_mode is mode


def test_what_the_operation_refuses_is_refused():
    mode = FakeTensorMode()
    node, _ = norm_of(mode, "rows", True, True, BF16)
    node.args[0].meta["val"] = node.args[0].meta["val"][:1]
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run_node(node, mode)


RNN = [torch.empty(shape) for shape in ((18, 8), (18, 6), (18,), (18,)) * 2]
RNN_OPTIONS = (True, 1, 0.0, True, True)  # biases, layers, dropout, train, bidirectional
PRODUCTS = {
    "linear": (F.linear, (torch.empty(3, 5, 8).transpose(0, 1), torch.empty(4, 8), torch.empty(4))),
    "linear of one row": (F.linear, (torch.empty(8), torch.empty(4, 8))),
    "matmul": (torch.matmul, (torch.empty(2, 1, 5, 8), torch.empty(3, 7, 8).mT)),
    "matmul of vectors": (operator.matmul, (torch.empty(8), torch.empty(8))),
    "matmul of none": (torch.matmul, (torch.empty(0, 8), torch.empty(8, 3))),
    "gru": (torch.gru, (torch.empty(3, 5, 8), torch.empty(2, 3, 6), RNN, *RNN_OPTIONS, True)),
    "gru of sequences first": (torch.gru, (torch.empty(5, 3, 8), torch.empty(2, 3, 6), RNN, *RNN_OPTIONS, False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_values_that_the_fake_mode_finds(name, dtype):
    function, args = PRODUCTS[name]
    graph, mode = Graph(), FakeTensorMode()

    def node_of(tensor):
        node = graph.placeholder("given")
        node.meta["val"] = mode.from_tensor(tensor.to(dtype))
        return node

    nodes = tree_map_only(torch.Tensor, node_of, args)
    found = run_node(graph.call_function(function, nodes), mode)
    with tracing_fake(mode, symbolic=False), torch.no_grad():
        expected = function(*tree_map_only(Node, lambda n: n.meta["val"], nodes))
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert layout_of(one) == layout_of(other)


def alike(node, found, called):
    """Whether two values of a node have the same layouts, and alias the same inputs."""
    given = [t for source in node.all_input_nodes for t in tensors(value(source))]
    seen = [
        [(*layout_of(t), t.storage_offset(), [storage_key(t) == storage_key(g) for g in given]) for t in tensors(val)]
        for val in (found, called)
    ]
    return seen[0] == seen[1] and type(found) is type(called)


@pytest.fixture
def compared(monkeypatch):
    """What is told without a call, beside the call, in all graphs: (node, whether both are alike)."""
    found = []

    def both(node, mode):
        known = in_other_dtype(node, mode)
        if known is not None:
            found.append((node, alike(node, known, run_node(node, mode))))
        return known

    monkeypatch.setattr(insert_casts, "in_other_dtype", both)
    return found


@pytest.mark.parametrize("policy", ["bf16", "fp16,accuracy=fast"])
@pytest.mark.parametrize("name", ["rotary_mqa", "perceiver", "multihead_attention", "nanogpt", "conformer_glu"])
def test_what_is_told_without_a_call_is_what_the_call_gives(name, policy, compared):
    model, args, kwargs = make(CASES[name], 0)
    amp_graph.convert(model, policy)(*args, **kwargs)
    assert len(compared) >= 5
    assert [node.format_node() for node, is_alike in compared if not is_alike] == []


@pytest.mark.parametrize("keeps", [False, True])
def test_an_operation_that_chooses_its_dtype_is_called(keeps, monkeypatch):
    """And control: it would have the wrong one."""
    graph, mode = Graph(), FakeTensorMode()
    x, full = graph.placeholder("x"), mode.from_tensor(torch.empty(4, 4))
    give_value(x, full)
    node = graph.call_function(torch.softmax, (x, -1, torch.float32))
    give_value(node, mode.from_tensor(torch.empty(4, 4)))
    set_identity(node, mode)
    x.meta["val"] = mode.from_tensor(torch.empty(4, 4, dtype=BF16))
    if keeps:
        monkeypatch.setattr(fake_values, "_keeps_dtype", lambda operation: True)
    told = in_other_dtype(node, mode)
    assert run_node(node, mode).dtype == torch.float32
    assert (told is not None and told.dtype == BF16) if keeps else told is None
