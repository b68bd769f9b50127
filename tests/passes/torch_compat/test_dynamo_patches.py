"""Dynamo is mended while a model is captured, and only then; each mend is still needed."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock

import amp_graph
from amp_graph.passes.torch_compat.dynamo_patches import MENDS, mended
from tests.layers import forward_of, layers

X = torch.randn(4, 8)


def names():
    return {(owner, name): vars(owner)[name] for owner, name, _ in MENDS}


def plainly(model):
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(model), backend="eager")


def test_there_are_few_and_they_go_with_the_capture():
    before, seen = names(), []

    @forward_of(nn.Module)
    def Looks(self, x):
        return looks(x) + 1

    @torch.library.custom_op("amp_graph_tests::looks_at_names", mutates_args=())
    def looks(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @looks.register_fake
    def _(x):
        seen.append(names())
        return torch.empty_like(x)

    amp_graph.convert(Looks(), "bf16")(X)
    assert len(MENDS) <= 4
    assert seen
    assert all(now[key] is not before[key] for now in seen for key in before)
    assert names() == before


def test_they_go_after_an_error_and_inside_of_each_other():
    before = names()
    with pytest.raises(KeyError), mended(tells_masks=True), mended(tells_masks=False):
        raise KeyError
    assert names() == before


def test_no_other_thread_captures_meanwhile():
    with mended(tells_masks=False):
        got = []
        thread = threading.Thread(target=lambda: got.append(compile_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert got == [False]


@layers(lambda: dict(part=nn.Linear(8, 8)))
def Shrinks(self, x):
    while x.norm() > 10:
        x = 0.9 * x + 1e-5 * self.part(x)
    return self.part(x)


def test_needed_for_loops_whose_end_a_value_decides():
    frames = []
    torch._dynamo.reset()
    torch.compile(Shrinks(), backend=lambda gm, _: frames.append(gm) or gm.forward)(100 * X)
    assert len(frames) > 1, "torch leaves the frame alone by itself: _to_the_end_of_loops can go"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_needed_for_models_that_ask_whether_they_are_compiled():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    mask = torch.tensor([[False, False, True]])
    with torch.no_grad():
        want, found = (one(X[None, :3], src_key_padding_mask=mask) for one in (model, plainly(model)))
    assert not torch.allclose(want, found), "torch computes what eager mode does: _calling_others can go"


@forward_of(nn.Module)
def Selects(self, x, mask):
    return torch.masked_select(x, mask), x.masked_select(mask), torch.masked_select(x, mask=mask)


def test_needed_for_masks_that_are_larger_than_their_tensor():
    given = X[:1], torch.ones(4, 8, dtype=torch.bool)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(RuntimeError):
        plainly(Selects())(*given)
    model = amp_graph.convert(Selects(), "bf16", strict=True)
    assert all(map(torch.equal, model(*given), Selects()(*given)))
