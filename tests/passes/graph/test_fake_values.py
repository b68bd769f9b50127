"""Values that are computed on the meta device, and those of casts, are the fake mode's own, layouts and errors too."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from amp_graph.passes.graph.fake_values import run_node
from amp_graph.passes.torch_compat.fake import FakeTensorMode, tracing_fake

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
        assert (found.shape, found.stride(), found.dtype, found.device) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
            expected.device,
        )
        assert type(found) is type(expected)
        assert found.fake_mode is mode


def test_what_the_operation_refuses_is_refused():
    mode = FakeTensorMode()
    node, _ = norm_of(mode, "rows", True, True, BF16)
    node.args[0].meta["val"] = node.args[0].meta["val"][:1]
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run_node(node, mode)


@pytest.mark.parametrize("image", IMAGES)
def test_a_cast_lies_as_an_empty_tensor_like_its_source(image):
    with FakeTensorMode():
        x = IMAGES[image](torch.float32)
        cast, like = x.to(BF16), torch.empty_like(x, dtype=BF16)
    real = IMAGES[image](torch.float32).to(BF16)
    assert like.stride() == cast.stride() == real.stride()
