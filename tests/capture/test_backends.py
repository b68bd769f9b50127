"""What runs a rewritten graph: PyTorch itself, inductor, any other backend, and ours under torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.by_hand import step_of
from tests.layers import layers
from tests.measure import DtypeLog, products

BF16 = torch.bfloat16


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)), torch.randn(6, 16)


def conv_net():
    torch.manual_seed(0)
    # No bias before the batch norm: its gradient is zero, and what is computed for it is noise.
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def step(model, x):
    """Output and all gradients of one step."""
    return step_of(model, x, loss=lambda out: F.mse_loss(out.float(), torch.ones_like(out, dtype=torch.float32)))


def converted_and_anew(build=mlp):
    """What a step of a converted model gives, and the same model again, with its input."""
    model, x = build()
    return step(amp_graph.convert(model, "bf16"), x), *build()


def close(got, wanted, tolerance):
    """Relative L2 distance of each pair of tensors is below `tolerance`."""
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("compile", "build"),
    [
        ("aot_eager", mlp),
        ("inductor", mlp),
        pytest.param("inductor", conv_net, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_agrees_with_the_eager_one(compile, build):
    """Inductor keeps some values in fp32 that eager rounds: half a bf16 digit of difference is right."""
    wanted, model, x = converted_and_anew(build)
    full = step(model, x)
    model, x = build()
    amp_graph.convert(model, "bf16", compile=compile)
    for _ in range(2):
        got = step(model, x)
    assert conversion_of(model).runs == 2
    close(got[:1], wanted[:1], 1e-2)
    close(got[1:], wanted[1:], 3e-2)
    assert any(not torch.equal(a, b) for a, b in zip(got, full, strict=True)), "ran in fp32"


def test_a_callable_receives_the_rewritten_graph():
    seen = []

    def backend(gm, example_inputs):
        seen.append((gm, len(example_inputs)))
        return gm.forward

    wanted, model, x = converted_and_anew()
    got = step(amp_graph.convert(model, "bf16", compile=backend), x)
    ((gm, count),) = seen
    assert isinstance(gm, torch.fx.GraphModule)
    assert count == len(gm.graph.find_nodes(op="placeholder"))
    assert "bfloat16" in gm.print_readable(print_output=False)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert amp_graph.report(model).compile == "backend"


def test_an_error_of_a_callable_arrives():
    def backend(gm, example_inputs):
        raise ValueError("no luck")

    model, x = mlp()
    amp_graph.convert(model, "bf16", compile=backend)
    with pytest.raises(Exception, match="no luck"):
        model(x)


@pytest.mark.parametrize("backend", ["amp_graph", "function"])
def test_our_backend_under_torch_compile(backend):
    from amp_graph.capture.dynamo_backend import amp_graph as function

    wanted, model, x = converted_and_anew()
    compiled = torch.compile(
        model, backend="amp_graph" if backend == "amp_graph" else function, options={"policy": "bf16"}
    )
    assert all(torch.equal(a, b) for a, b in zip(step(compiled, x), wanted, strict=True))
    assert set(products(compiled, x)) == {BF16}


def test_our_backend_takes_the_next_one_as_an_option():
    wanted, model, x = converted_and_anew()
    compiled = torch.compile(model, backend="amp_graph", options={"policy": "bf16", "compile": "aot_eager"})
    close(step(compiled, x), wanted, 3e-2)


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_a_checkpointed_model_recomputes(compile):
    """The number of matrix products of a step is that of the unconverted model: no more, and no fewer."""
    from torch.utils.checkpoint import checkpoint

    @layers(lambda: dict(block=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))))
    def Net(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

    def count_of_products(model):
        x = torch.randn(4, 8)
        model(x).sum().backward()
        with DtypeLog() as log:
            model(x).sum().backward()
        return sum(n in {"aten.addmm", "aten.mm"} for n, _ in log.entries)

    wanted = count_of_products(Net())
    assert count_of_products(amp_graph.convert(Net(), "bf16", compile=compile)) == wanted
