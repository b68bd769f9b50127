"""The optimal planner on real graphs: least cost, never above the painting's, and the casts it counts are made."""

import re

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.casts.saturation import within_range
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.graph.meta_keys import CAST
from amp_graph.passes.precision.build_assignment import low_of
from amp_graph.passes.precision.min_cut_planner import choices, mincut
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.precision.planning_problem import FULL, LOW
from amp_graph.passes.precision.precision_assignment import cheapest, cost, is_legal
from amp_graph.passes.precision.rule_based_planner import operands, paint
from tests.passes.golden_models import CASES as GOLDEN
from tests.passes.graphs import FP32, capture, capture_function, node_named, passes_until, rewritten
from tests.passes.planning import formulated
from tests.passes.programs import captured

SEEDS = range(32)
FEW = SEEDS[:16]
POLICIES = ("bf16", "bf16,accuracy=fast", "fp16")
MACHINES = ("cpu_amx", "cpu_bf16", "cpu", "cuda")


def test_control_the_painting_is_not_always_the_cheapest():
    made = [formulated(captured(seed), "bf16") for seed in FEW]
    painted = [cost(m.task(), low_of(paint(m.problem), m)) for m in made]
    best = [cost(m.task(), cheapest(m.task())) for m in made]
    assert sum(p > b for p, b in zip(painted, best, strict=True)) >= 3


EVERY = [pytest.param(policy, on, SEEDS, marks=pytest.mark.slow) for policy in POLICIES for on in MACHINES]


@pytest.mark.parametrize(("policy", "on", "seeds"), [("bf16", "cpu_amx", FEW), ("fp16", "cuda", FEW), *EVERY])
def test_never_above_the_painting(policy, on, seeds):
    for seed in seeds:
        never_above(formulated(captured(seed), policy, on))


def never_above(made):
    task = made.task(skip=False)
    low = cheapest(task)
    assert is_legal(task, low)
    assert cost(task, low) <= cost(task, low_of(paint(made.problem), made))
    chosen = mincut(made)
    assert cost(task, low_of(chosen, made)) == cost(task, low)


def counted(made, low):
    """(value, precision) of every cast that the cost counts."""
    held = {n: made.of.get(n, i) for n, i in made.holds.items()}
    return {(n.name, FULL if held[n] in low else LOW) for n, cast in made.casts() if cast.is_due(low)}


def inserted(seed, policy):
    """(value, precision) of every cast that is inserted, marks, and whether a kernel refused."""
    gm, done = captured(seed).through(passes_until(InsertCasts, policy))
    kept = any(c.action == "kept full" for c in done[-1].result.changes)
    casts = [n for n in gm.graph.nodes if CAST in n.meta]
    sources = [n.args[0].args[0] if n.args[0].target is within_range else n.args[0] for n in casts]
    found = {
        (source.name, FULL if n.meta["val"].dtype == FP32 else LOW) for source, n in zip(sources, casts, strict=True)
    }
    return found, {n.name: m for n, m in marks(gm).items()}, kept


@pytest.mark.parametrize(
    ("policy", "seeds"),
    [("bf16", FEW), *(pytest.param(policy, SEEDS, marks=pytest.mark.slow) for policy in POLICIES)],
)
def test_the_casts_that_are_counted_are_those_that_are_made(policy, seeds):
    compared = 0
    for seed in seeds:
        made = formulated(captured(seed), policy)
        low = cheapest(made.task(skip=False))
        casts, marked, kept = inserted(seed, policy)
        if kept:  # a kernel refused, which no plan knows
            continue
        compared += 1
        promoted = {
            (given.promoted[0].name, FULL)
            for node in made.of
            if made.is_free(node)
            and made.of[node] not in low
            and (given := operands(node, made.problem.classes[node])).promoted
            if all(made.holds[n] in low for n in given.promoted)
        }
        assert casts == counted(made, low) | promoted, seed
        assert {n.name: i in low for n, i in made.of.items() if marked[n.name].precision != "captured"} == {
            name: mark.precision == LOW for name, mark in marked.items() if mark.precision != "captured"
        }
    assert compared >= len(seeds) * 25 // 32


# -- what the plan is, on graphs small enough to know -------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_models_are_planned_as_they_are_painted(name, policy):
    build, inputs = GOLDEN[name]
    with torch._dynamo.config.patch(allow_rnn=True):
        graph = capture(build(), *inputs())
    assert graph_text(rewritten(graph, policy)) == graph_text(rewritten(graph, policy + ",planner=paint"))


def test_a_value_is_widened_before_it_grows():
    """256 times as many elements behind the expand: the painting casts there, the minimum cut before."""

    graph = capture_function(
        lambda m, x: F.linear(x, m.w).expand(256, 8, 8).exp(), torch.randn(1, 8, 8), w=torch.randn(8, 8)
    )
    at = {}
    for planner in ("paint", "mincut"):
        gm = rewritten(graph, f"fp16,planner={planner}")
        (cast,) = [n for n in gm.graph.nodes if CAST in n.meta and n.meta["val"].dtype == FP32]
        at[planner] = tuple(cast.meta["val"].shape)
    assert at == {"paint": (256, 8, 8), "mincut": (1, 8, 8)}


def test_reasons_say_that_time_decided():
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    gm = rewritten(capture_function(lambda m, x: F.linear(F.gelu(F.linear(x, m.w)), m.w), x, w=w))
    assert (
        node_named(gm, "gelu")
        .meta["amp"]
        .reason.endswith("every operand is low precision; at the least predicted time")
    )


@pytest.mark.parametrize("policy", [*POLICIES, "bf16,accuracy=2.0"])
def test_reasons_of_what_the_cut_leaves_full_are_true(policy):
    """Low precision is not permitted, or takes longer. The reason of the list may argue for it, and is not said."""
    seen = set()
    for seed in SEEDS:
        made = formulated(captured(seed), policy)
        task, low = made.task(), cheapest(made.task())
        for node, choice in choices(made, low).items():
            i = made.of[node]
            if node in made.tied or not made.is_free(node) or i in low:
                continue
            assert choice.precision == FULL
            seen.add(re.sub(r"\d+", "N", choice.reason))
            if choice.reason.startswith("not profitable"):
                assert is_legal(task, low | {i})
                assert cost(task, low | {i}) > cost(task, low)
            elif "budget" not in choice.reason:
                assert not is_legal(task, low | {i})
    assert seen
    assert seen <= WHY_FULL


WHY_FULL = {
    "what it reads is full precision",
    "a reader takes full precision",
    "not profitable: low precision with N casts of operands would take longer",
    "full precision in the fastest plan within the error budget; at the least predicted time",
}
SKIP = "skip_unprofitable=true"


def mlp(rows, width):
    weights = {"a": torch.randn(width, width), "b": torch.randn(width, width)}
    return capture_function(
        lambda m, x: F.linear(torch.relu(F.linear(x, m.a)), m.b), torch.randn(rows, width), **weights
    )


def dtypes(gm):
    return {n.meta["val"].dtype for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}


@pytest.mark.parametrize(
    ("name", "policy", "rows", "low"),
    [
        ("cpu_amx", "bf16", 1, False),
        ("cpu_amx", "fp16", 512, False),
        ("cpu_amx", "bf16", 512, True),
        ("cpu_bf16", "bf16", 1, False),
        ("cpu_bf16", "fp16", 512, False),
        ("cpu_bf16", "bf16", 512, True),
        ("cpu", "bf16", 512, False),
    ],
)
def test_an_mlp_is_left_alone_where_low_precision_does_not_pay(on, name, policy, rows, low):
    on(name)
    graph = mlp(rows, 256)
    gm = rewritten(graph, f"{policy},{SKIP}")
    assert (dtypes(gm) != {FP32}) == low
    if not low:
        assert graph_text(gm) == graph_text(graph.fresh())
        first = next(m for m in marks(gm).values() if "aten.linear" in m.ops)
        assert first.reason.startswith("not profitable")
        assert first.precision == FULL


@pytest.mark.by_profit
@pytest.mark.parametrize(("policy", "planned"), [(f"bf16,{SKIP}", ["low", "full"]), ("auto", ["low", "low"])])
def test_what_the_owner_wants_low_stays_low(on, policy, planned):
    on("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0] = amp_graph.precision("low")(model[0]) or model[0]
    amp_graph.convert(model, policy)
    model(torch.randn(2, 8))
    nodes = amp_graph.report(model).graphs[0].nodes
    assert [n.precision for n in nodes if "aten.linear" in n.ops] == planned


def test_a_reproduction_of_autocast_never_leaves_a_product_alone():
    graph = mlp(1, 256)
    plain = graph_text(rewritten(graph, "fp16,lists=autocast_cpu"))
    assert graph_text(rewritten(graph, "fp16,lists=autocast_cpu,planner=paint")) == plain
    with pytest.raises(amp_graph.AmpGraphError, match="skip_unprofitable"):
        rewritten(graph, f"fp16,lists=autocast_cpu,{SKIP}")
