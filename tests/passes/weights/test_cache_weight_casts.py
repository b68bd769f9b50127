"""Casts of parameters become reads of their copies: which, which not, and the words of a parameter."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.weights.cache_entry import may_be_kept
from amp_graph.passes.weights.cast_cache import WeightCopies

X = torch.randn(3, 4)


class Net(nn.Module):
    """One weight for each of the pass's rules."""

    def __init__(self):
        super().__init__()
        self.kept, self.viewed = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.written = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("held", torch.randn(4, 4))

    def forward(self, x):
        self.written.add_(1.0)
        return self.kept(x) @ self.viewed.t() @ self.held @ self.written


def text_of(model, policy="bf16"):
    amp_graph.convert(model, policy, strict=True)(X)
    return amp_graph.report(model).graphs[0]


def test_the_graph_as_text():
    graph = text_of(nn.Linear(4, 2))
    assert graph.text == (
        "%0: f32[2,4] = input weight\n"
        "%1: f32[2] = input bias\n"
        "%2: f32[3,4] = input input\n"
        "%3: bf16[3,4] = .bfloat16(%2)\n"
        "%4: bf16[2,4] = weight_copy(%0, once=True)\n"
        "%5: bf16[2] = weight_copy(%1, once=True)\n"
        "%6: bf16[3,2] = linear(%3, %4, %5)\n"
        "%7: f32[3,2] = .float(%6)\n"
        "return (%7,)"
    )


@pytest.mark.parametrize("verify", ["0", "1"])
def test_only_parameters_that_nobody_writes(verify, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", verify)
    casts = {c.source: c.kept for c in text_of(Net()).casts if c.of == "weight"}
    kept = {name for name, is_kept in casts.items() if is_kept}
    assert kept == {"kept.weight", "kept.bias", "viewed"}
    assert "held" in casts


def test_the_policy_switches_it_off():
    graph = text_of(nn.Linear(4, 2), "bf16,weight_copies=false")
    assert "weight_copy" not in graph.text
    assert not any(c.kept for c in graph.casts)


def test_rewrite_and_the_backend_keep_plain_casts():
    gm = amp_graph.rewrite(torch.export.export(nn.Linear(4, 2), (X,)).module(), "bf16")
    assert "weight_copy" not in gm.code
    compiled = torch.compile(nn.Linear(4, 2), backend="amp_graph", options={"policy": "bf16"})
    compiled(X)


def not_kept():
    weight = nn.Parameter(torch.randn(4, 4))
    with torch.inference_mode():
        inference = nn.Parameter(torch.randn(4, 4))
    flat = nn.Parameter(torch.randn(4, 4))
    flat._fsdp_flattened = True

    class Own(nn.Parameter):
        pass

    return {
        "a tensor": torch.randn(4, 4),
        "computed": weight * 2,
        "a part": nn.Parameter(torch.randn(8)[4:]),
        "of another storage": nn.Parameter(torch.randn(8)[:4]),
        "inference": inference,
        "shared": nn.Parameter(torch.randn(4).share_memory_()),
        "fsdp": flat,
        "empty": nn.Parameter(torch.empty(0)),
        "subclass": Own(torch.randn(4)),
        "sparse": nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False),
        "meta": nn.Parameter(torch.empty(4, device="meta")),
    }


@pytest.mark.parametrize("kind", not_kept())
def test_what_has_no_copy_is_cast_as_ever(kind):
    weight = not_kept()[kind]
    assert not may_be_kept(weight)
    copies = WeightCopies(torch.bfloat16)
    for _ in range(2):
        low = copies.read(weight)
        assert low.dtype == torch.bfloat16
        assert low.requires_grad == (weight.requires_grad and torch.is_grad_enabled())
    assert not copies.tensors


def test_control_a_plain_parameter_has_one():
    weight, copies = nn.Parameter(torch.randn(4, 4)), WeightCopies(torch.bfloat16)
    assert may_be_kept(weight)
    with torch.no_grad():
        assert copies.read(weight) is copies.read(weight)
    assert copies.bytes == 32


def test_what_a_fake_mode_makes_is_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight, copies = nn.Parameter(torch.randn(4, 4)), WeightCopies(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        copies.read(weight)
        copies.read(mode.from_tensor(weight))
    assert not copies.tensors
    assert torch.equal(copies.read(weight), weight.bfloat16())


def test_strides_are_kept():
    weight = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    copies = WeightCopies(torch.bfloat16)
    for _ in range(2):
        assert copies.read(weight).stride() == weight.stride()
        copies.read(weight).float().sum().backward()
        assert weight.grad.stride() == weight.bfloat16().float().stride()


@pytest.mark.parametrize(("layout", "grad", "last"), [(torch.channels_last, True, True),
                                                      (torch.channels_last, False, False),
                                                      (torch.contiguous_format, True, False)])  # fmt: skip
def test_copies_of_trained_channels_last_convolutions_are_channels_last(layout, grad, last):
    model, x = nn.Conv2d(128, 128, 3), torch.randn(1, 128, 4, 4).to(memory_format=layout)
    amp_graph.convert(model, "bf16,skip=channels_last|prepack_weights", strict=True)
    with torch.set_grad_enabled(grad):
        model(x)
    text = amp_graph.report(model).graphs[0].text
    assert "weight_copy(%0" in text
    assert ("last=True" in text) == last, text
