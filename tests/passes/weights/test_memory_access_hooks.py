"""Accesses to memory are noticed, and nothing else about them is another: for Python, torch.compile and subclasses."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from amp_graph.passes.weights import memory_access_hooks
from amp_graph.passes.weights.memory_access_hooks import leave_accesses_alone, notice_accesses
from amp_graph.passes.weights.watched_memory import HELD, OTHERS, look_at_parts_of, watch_of


@pytest.fixture(autouse=True)
def _noticed():
    notice_accesses()
    yield
    notice_accesses()


def plain_compiled(function, x, whole):
    """What ``function`` returns compiled, and what it raises, with and without the accesses being noticed."""
    found = []
    for noticed in (True, False):
        notice_accesses() if noticed else leave_accesses_alone()
        torch._dynamo.reset()
        try:
            result = torch.compile(function, backend="eager", fullgraph=whole)(x.clone())
            found.append(result.tolist() if isinstance(result, torch.Tensor) else type(result))
        except torch._dynamo.exc.Unsupported as error:
            found.append(type(error))
    return found


def sets_data(x):
    x.data = x * 2
    return x + 1


def writes_data(x):
    x.data.mul_(2)
    return x + 1


def keeps_the_version(x):
    with torch.autograd._unsafe_preserve_version_counter(x):
        return x.mul_(2)


FUNCTIONS = {
    "reads data": lambda x: x.data * 2,
    "sets data": sets_data,
    "writes data": writes_data,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy() * 2),
    "numpy as a function": lambda x: torch.from_numpy(torch.Tensor.numpy(x.detach()) * 2),
    "chunks": lambda x: x.unsafe_chunk(2)[0] * 2,
    "chunks as a function": lambda x: torch.unsafe_chunk(x, 2)[0] * 2,
    "an address": lambda x: x.data_ptr(),
    "an address as a function": lambda x: torch.Tensor.data_ptr(x),
    "a storage": lambda x: x.untyped_storage().size(),
    "set_": lambda x: torch.empty(0).set_(x) * 1,
    "the reader of data": lambda x: torch.Tensor.data.__get__(x) * 2,
    "a version kept": keeps_the_version,
    "a capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "apply_": lambda x: x.apply_(lambda v: v + 1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_code_is_as_without(name):
    for whole in (True, False):
        ours, theirs = plain_compiled(FUNCTIONS[name], torch.ones(4, 4), whole)
        assert ours == theirs


def test_what_is_not_a_matter_of_memory_stays():
    x = nn.Parameter(torch.randn(3))
    assert copy.deepcopy(x).data.equal(x.data)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file).equal(x)
    for method in (torch.Tensor.numpy, torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr, torch.to_dlpack):
        assert pickle.loads(pickle.dumps(method)) is method
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    with pytest.raises(TypeError):
        x.data = 3
    with FakeTensorMode() as mode:
        assert mode.from_tensor(x).data.shape == (3,)
    assert torch.eye(2).to_sparse().data.layout is torch.sparse_coo


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append((function.__name__, is_tensor_method_or_property(function)))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_what_it_saw():
    x, found = torch.randn(3), []
    for noticed in (True, False):
        notice_accesses() if noticed else leave_accesses_alone()
        with Seen() as seen:
            x.data, x.numpy(), x.data_ptr(), x.untyped_storage(), x.unsafe_chunk(1)
        found.append(seen.names)
    assert found[0] == found[1]
    assert len(found[0]) == 5


def test_all_is_as_it_was_afterwards():
    leave_accesses_alone()
    before = {name: vars(torch.Tensor).get(name) for name in ("data", "data_ptr", *memory_access_hooks.METHODS)}
    notice_accesses()
    notice_accesses()
    assert torch.Tensor.data is not before["data"]
    assert torch.Tensor.data.__doc__ == torch._C.TensorBase.data.__doc__
    leave_accesses_alone()
    assert {name: vars(torch.Tensor).get(name) for name in before} == before


# -- memory that is a part of a file ----------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self, file):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.empty(0).set_(file[i : i + 64])) for i in (0, 64))


def why_not_free(model):
    return {watch_of(p).why_not_free(p) for p in model.parameters()}


def test_parts_of_a_file(tmp_path):
    place = tmp_path / "weights"
    place.write_bytes(bytes(128))
    file = torch.UntypedStorage.from_file(str(place), shared=False, nbytes=128)
    model, another = Parts(file), file[0:64]
    assert why_not_free(model) == {OTHERS}, "a model that nobody knows"
    look_at_parts_of(model)
    assert why_not_free(model) == {OTHERS}
    del file
    assert why_not_free(model) == {OTHERS}, "there is another part"
    del another
    assert why_not_free(model) == {""}
    held = model.one.data
    assert why_not_free(model) == {"", HELD}
    del held
    assert why_not_free(model) == {""}


def test_a_file_that_other_processes_write_is_not_the_models_own(tmp_path):
    place = tmp_path / "weights"
    place.write_bytes(bytes(128))
    model = Parts(torch.UntypedStorage.from_file(str(place), shared=True, nbytes=128))
    look_at_parts_of(model)
    assert why_not_free(model) == {OTHERS}


@pytest.mark.parametrize("load", [lambda f: torch.load(f), lambda f: torch.load(f).clone()], ids=["loaded", "copied"])
def test_memory_that_torch_allocated_is_its_tensors_own(load, tmp_path):
    torch.save(torch.randn(4, 4), tmp_path / "one")
    weight = nn.Parameter(load(tmp_path / "one"))
    assert watch_of(weight).why_not_free(weight) == ""


@pytest.mark.parametrize(
    "given",
    [lambda: torch.from_numpy(np.ones(4, np.float32)), lambda: torch.frombuffer(bytearray(16), dtype=torch.float32)],
)
def test_memory_that_torch_did_not_allocate_is_not(given):
    weight = nn.Parameter(given())
    assert watch_of(weight).why_not_free(weight) == OTHERS
