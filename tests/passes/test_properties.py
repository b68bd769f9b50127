"""Random small graphs through every pass: contract, idempotence, determinism, parameters, dtypes."""

import pytest
import torch

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.manager import run_passes
from tests.passes.graphs import BF16, FP32, run_step, standard_passes
from tests.passes.programs import captured, program

SEEDS = range(32)
POLICIES = ("bf16", "bf16,accuracy=fast", "fp16", "bf16,lists=autocast_cpu")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_contract_holds_after_every_pass(seed, policy):
    graph = captured(seed)
    gm, done = graph.through(standard_passes(policy))
    assert [d.name for d in done] == [p.name for p in standard_passes(policy)]
    step, plain = run_step(gm, graph.given), run_step(graph.gm, graph.given)
    assert [(t.dtype, t.shape) for t in step.outputs] == [(t.dtype, t.shape) for t in plain.outputs]
    assert [g is None for g in step.grads] == [g is None for g in plain.grads]
    assert all(g is None or g.dtype == FP32 for g in step.grads)
    # Both round differently at most as autocast's two neighbours do: no operation was lost or doubled.
    assert (step.outputs[0] - plain.outputs[0]).norm() <= 0.1 * plain.outputs[0].norm() + 1e-3 or "bf16" not in policy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_metadata_says_what_runs(seed):
    """Every node's recorded dtype and shape is what the node really returns."""
    graph = captured(seed)
    gm, _ = graph.through(standard_passes())

    class Compare(torch.fx.Interpreter):
        def run_node(self, n):
            got = super().run_node(n)
            said_of = tensors(value(n)) if n.op != "output" else tensors(got)
            for t, said in zip(tensors(got), said_of, strict=True):
                assert (t.dtype, t.shape) == (said.dtype, said.shape), n.name
            return got

    Compare(gm).run(*graph.given)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_text_is_deterministic_twice_changes_nothing_and_parameters_are_shared(seed):
    model, inputs = program(seed, grad_modes=False)
    traced = torch.fx.symbolic_trace(model)
    before = traced.graph.python_code("self").src
    once = amp_graph.rewrite(traced, "bf16", inputs)
    assert traced.graph.python_code("self").src == before, "the graph that is given stays as it was"
    again = amp_graph.rewrite(torch.fx.symbolic_trace(model), "bf16", inputs)
    assert graph_text(once) == graph_text(again)
    assert graph_text(amp_graph.rewrite(once, "bf16")) == graph_text(once)
    ours, own = dict(once.named_parameters()), dict(model.named_parameters())
    assert ours
    assert all(own[name] is p and p.dtype == FP32 and p.requires_grad for name, p in ours.items())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("index", range(len(standard_passes())), ids=[p.name for p in standard_passes()])
def test_a_pass_run_again_changes_nothing(index, policy):
    wrong = []
    for seed in SEEDS:
        gm = captured(seed).fresh()
        passes = standard_passes(policy)
        run_passes(gm, passes[: index + 1], checked=False)
        text = graph_text(gm)
        (second,) = run_passes(gm, [passes[index]], checked=True)
        # The plan lists every mark, changed or not: test_planning_again compares the marks.
        reported = second.result.modified and passes[index].name != "plan-precision"
        if reported or graph_text(gm) != text:
            wrong.append((seed, second.result.changes[:1]))
    assert not wrong, f"{len(wrong)} of {len(SEEDS)}: {wrong[:2]}"


@pytest.mark.parametrize("seed", range(0, 32, 4))
def test_an_exported_graph_is_rewritten_too(seed):
    model, inputs = program(seed, grad_modes=False)
    with torch.no_grad():
        exported = torch.export.export(model, tuple(x.detach() for x in inputs), strict=False)
        made = amp_graph.rewrite(exported.module(check_guards=False), "bf16")
        got, want = made(*inputs), model(*inputs)
    assert {t.dtype for n in made.graph.nodes for t in tensors(value(n))} >= {FP32}
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert (got[0] - want[0]).norm() <= 0.1 * want[0].norm() + 1e-3


@pytest.mark.parametrize("seed", range(0, 32, 4))
def test_a_converted_program_runs_the_graph_that_rewrite_makes(seed):
    model, (x, y) = program(seed)
    graph = captured(seed)
    want = run_step(graph.through(standard_passes())[0], graph.given)
    torch._dynamo.reset()
    converted = amp_graph.convert(model, "bf16")
    got = converted(x.clone(), y.detach().clone().requires_grad_())
    assert len(conversion_of(converted).graphs) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, want.outputs, strict=True))


def test_the_generator_reaches_what_it_is_for():
    """Low values, casts, the user's own conversions, writes and regions all occur."""
    lines = [line.kind for seed in SEEDS for line in program(seed)[0].lines]
    wanted = ("no_grad", "write_view", "write_after_read", "write_mixed", "there_and_back", "wide_reader", "low")
    assert min(lines.count(kind) for kind in wanted) >= 3
    rewritten = [captured(seed).through(standard_passes())[0] for seed in SEEDS]
    assert sum(any(t.dtype == BF16 for n in gm.graph.nodes for t in tensors(value(n))) for gm in rewritten) >= 30
