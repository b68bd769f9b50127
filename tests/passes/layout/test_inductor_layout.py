"""Through Inductor on CUDA, images are in channels_last only where Inductor's own heuristic agrees."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.layout.channels_last import KEPT_BY_INDUCTOR
from amp_graph.passes.torch_compat.inductor import ConvolutionArgs, lays_out_channels_last

pytestmark = [  # what importing Inductor says, by torch 2.11 to 2.13
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*jit.script_method:DeprecationWarning"),
]


class Net(nn.Module):
    def __init__(self, *convolutions):
        super().__init__()
        self.convolutions = nn.Sequential(*convolutions)

    def forward(self, x):
        return self.convolutions(x).mean((2, 3))


def conv(inside, outside, kernel=3, **options):
    return nn.Conv2d(inside, outside, kernel, padding=kernel // 2, **options)


# Name: convolutions, and whether Inductor chooses channels_last in training and in inference.
NETS = {
    "resnet-like": (lambda: Net(conv(3, 64, 7), nn.ReLU(), conv(64, 128)), True, True),
    "U-Net, whose decoder halves channels": (lambda: Net(conv(3, 128), nn.ReLU(), conv(128, 32)), False, True),
    "1x1 halves channels": (lambda: Net(conv(3, 128), nn.ReLU(), conv(128, 32, 1)), True, True),
    "grouped": (lambda: Net(conv(3, 128), conv(128, 128, groups=2)), False, None),
    "only grouped": (lambda: Net(conv(8, 128, groups=2), conv(128, 128, groups=2)), False, False),
    "depthwise": (lambda: Net(conv(3, 128), conv(128, 128, groups=128)), True, True),
    "few channels": (lambda: Net(conv(3, 16), conv(16, 16)), False, True),
    "transposed": (lambda: Net(conv(3, 128), nn.ConvTranspose2d(128, 64, 2, stride=2), conv(64, 96)), True, True),
}


def through_inductor(net, monkeypatch, options=None, policy="bf16,device=cuda", training=True, x=None):
    """Return what the pass did, and what Inductor decided of the graph that it was given, on a device that is no CPU.

    The rest of Inductor does not run: it has nothing to do with the layout.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.graph import GraphLowering

    decided = []

    def forward_of(gm, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
            decided.append(GraphLowering.decide_layout_opt(gm, is_inference=not training))
        return gm.forward

    def compiled(gm, inputs, **how):
        backward = {"bw_compiler": lambda gm, inputs: gm.forward}
        decomposed = {"decompositions": torch._inductor.decomposition.select_decomp_table()}
        return aot_autograd(fw_compiler=forward_of, **backward, **decomposed)(gm, inputs)

    monkeypatch.setattr("amp_graph.capture.dynamo_backend.compile_with_inductor", compiled)
    monkeypatch.setattr("amp_graph.passes.layout.channels_last.multiplies_bf16", lambda: True)
    torch.manual_seed(0)
    model = amp_graph.convert(net().train(training), policy, compile="inductor", options=options)
    shape = (2, next(net().parameters()).shape[1] * (2 if "groups=2" in str(net().convolutions[0]) else 1), 16, 16)
    with torch.set_grad_enabled(training):
        model(torch.randn(shape) if x is None else x)
    (graph,) = conversion_of(model).graphs
    (done,) = (one.result for one in graph.rewritten.passes if one.name == "channels-last")
    return done, decided[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_the_pass_follows_inductor(name, training, monkeypatch):
    net, *wanted = NETS[name]
    wanted = wanted[not training]
    done, decided = through_inductor(net, monkeypatch, training=training)
    assert wanted is None or decided == wanted
    assert bool(done.changes) == decided
    assert [one.reason for one in done.skips] == ([] if decided else [KEPT_BY_INDUCTOR])


def test_few_convolutions_of_many_nodes():
    call = ConvolutionArgs((2, 3, 16, 16), (128, 3, 3, 3), *((1, 1),) * 3, False, (0, 0), 1)
    assert lays_out_channels_last([call], 299, {}, training=True)
    assert not lays_out_channels_last([call], 300, {}, training=True)


@pytest.mark.parametrize(
    ("options", "layout"), [({"layout_optimization": False}, False), ({"force_layout_optimization": True}, True)]
)
def test_options_of_the_user_decide(options, layout, monkeypatch):
    net = NETS["resnet-like"][0] if not layout else NETS["few channels"][0]
    done, _ = through_inductor(net, monkeypatch, options)
    assert bool(done.changes) == layout


def test_elsewhere_nothing_changes(monkeypatch):
    """On the CPU Inductor runs all convolutions in channels_last; without Inductor the pass decides alone."""
    net = NETS["U-Net, whose decoder halves channels"][0]
    done, _ = through_inductor(net, monkeypatch, policy="bf16")
    assert done.changes
    for compile in ("eager", "aot_eager"):
        model = amp_graph.convert(net(), "bf16,device=cuda", compile=compile)
        model(torch.randn(2, 3, 16, 16))
        (graph,) = conversion_of(model).graphs
        assert any(one.name == "channels-last" and one.result.changes for one in graph.rewritten.passes)


def test_the_report_says_why(monkeypatch):
    through_inductor(NETS["few channels"][0], monkeypatch)
    model = amp_graph.convert(NETS["few channels"][0](), "bf16,device=cuda", compile="inductor")
    model(torch.randn(2, 3, 16, 16))
    assert "decide_layout_opt" in str(amp_graph.report(model).to_dict())
