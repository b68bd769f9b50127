"""Error budgets on real graphs: kept, never slower than the plans they span, and found out where harm is ignored."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.cli.command_plan import count_casts
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.graph.meta_keys import BUDGET, CAST
from amp_graph.passes.precision.build_assignment import low_of
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.min_cut_planner import choices
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.precision.planning_problem import FULL
from amp_graph.passes.precision.precision_assignment import is_legal
from amp_graph.passes.precision.sensitivity import Influence, influence_by_rule
from tests.corpus import make
from tests.passes.graphs import BF16, FP32, capture_function, passes_until, rewritten
from tests.passes.planning import machine, problem_of, problems_of
from tests.passes.programs import captured

SEEDS = range(40)
MORE = [("bf16", "cpu_amx"), ("bf16", "cpu_bf16"), *(("fp16", on) for on in ("cpu_amx", "cpu_bf16", "cuda"))]
MULTIPLES = (0.01, 0.5, 0.9, 1.0, 1.2, 1.5, 2.0, 1000.0)


@cache
def budgets(seed, on="cpu_amx", policy="bf16"):
    """The plans of one random program; a fast machine for low precision, on which small operations differ, too."""
    problem, dtype = problem_of(captured(seed), policy)
    slow_calls = replace(machine(on), call=1e-12)  # or else nothing so small is worth a cast
    return ErrorBudget(problem, slow_calls, dtype)


def keeps_its_promises(made):
    """What holds for any problem: the budget, the named plans as rivals, and that more error is never slower."""
    paths = {p: is_legal(made.plans.costs, p.low) for p in made.known}
    assert all(paths.values())  # the free set spans the plans that have names
    found = {m: made.within(m) for m in MULTIPLES}
    least = made.error(made.plans.safest())
    assert all(made.error(p) <= max(m, least) * (1 + 1e-9) for m, p in found.items())
    costs = [p.cost for m, p in found.items() if m >= least]
    assert costs == sorted(costs, reverse=True)
    painted, cut = made.painted("autocast"), made.cut("autocast")
    assert found[1.0].cost <= painted.cost
    assert cut.harm > painted.harm or found[1.0].cost <= cut.cost
    assert found[1000.0].cost <= min(made.painted("fast").cost, made.cut("fast").cost)
    assert all(low_of(choices(made.made, p.low), made.made) == p.low for p in found.values())
    return len({p.low for p in found.values()})


@pytest.mark.parametrize("seeds", [SEEDS[:12], pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize(
    ("policy", "on"), [("bf16", "cuda"), *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_random_programs_keep_their_budgets(policy, on, seeds):
    differing = [keeps_its_promises(budgets(seed, on, policy)) for seed in seeds]
    assert policy != "bf16" or sum(n > 1 for n in differing) >= len(seeds) // 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["bert_sdpa", "gpt2", "vit", "llama_gqa", "inplace_chain", "moe_index_add", "gat"])
def test_models_keep_their_budgets(name):
    model, args, kwargs = make(name)
    amp_graph.convert(model, "bf16")

    def visit(problem, dtype):
        for on in ("cpu_amx", "cuda"):
            keeps_its_promises(ErrorBudget(problem, machine(on), dtype))

    assert problems_of(lambda: model(*args, **kwargs), visit)


@pytest.fixture
def fast_calls(on):
    """Plan for a machine whose calls cost nothing, so that small operations are worth a choice."""
    on("cpu_amx", call=1e-12)


@pytest.mark.parametrize(
    ("multiple", "seeds"),
    [(1.0, SEEDS[:16]), *(pytest.param(multiple, SEEDS, marks=pytest.mark.slow) for multiple in (0.5, 1.0, 3.0))],
)
@pytest.mark.usefixtures("fast_calls")
def test_the_graph_is_what_was_planned_and_has_the_casts_that_were_counted(multiple, seeds):
    compared = 0
    for seed in seeds:
        gm, done = captured(seed).through(passes_until(InsertCasts, f"bf16,accuracy={multiple}"))
        if any(c.action == "kept full" for c in done[-1].result.changes):  # a kernel refused, which no plan knows
            continue
        compared += 1
        made = budgets(seed)
        plan = made.within(multiple)
        assert gm.meta[BUDGET] == made.budget(multiple, plan), seed
        casts = [n for n in gm.graph.nodes if CAST in n.meta]
        assert len({(n.args[0].name, n.meta["val"].dtype) for n in casts}) == count_casts(made, plan), seed
    assert compared >= len(seeds) * 25 // 40


# -- what is never rounded ----------------------------------------------------------------------------------


def precisions(function, *inputs, policy="bf16,accuracy=1000,deny=exp", **state):
    gm = rewritten(capture_function(function, *inputs, **state), policy)
    return {op: m.precision for m in marks(gm).values() for op in m.ops}


@pytest.mark.usefixtures("fast_calls")
def test_deny_operations_stay_full():
    w = torch.randn(512, 512)
    found = precisions(lambda m, x: F.linear(F.linear(x, m.w).exp(), m.w), torch.randn(512, 512), w=w)
    assert (found["aten.linear"], found["aten.exp"]) == ("low", FULL)


@pytest.mark.usefixtures("fast_calls")
def test_no_table_is_rounded_for_a_gather_and_nothing_for_a_selection():
    def f(m, i):
        rows = F.embedding(i, m.table) * 1.5
        return F.linear(rows + rows.amax(-1, keepdim=True), m.w)

    found = precisions(f, torch.arange(512) % 8, table=torch.randn(8, 512), w=torch.randn(512, 512))
    assert found["aten.embedding"] == found["aten.mul"] == found["aten.amax"] == FULL
    assert found["aten.linear"] == "low"


@pytest.mark.parametrize("name", ["cpu_bf16", "cpu_amx"])
def test_attention_is_low_where_ours_is_the_kernel(on, name):
    """Of the time alone: torch's kernel of bf16, whose rate plans went by, is slower than that of fp32."""

    def attend(m, x, y):
        return F.linear(F.scaled_dot_product_attention(F.linear(x, m.w), F.linear(y, m.w), F.linear(x, m.w)), m.w)

    slow = {**machine(name).rates, "attention": {"float32": 6e10, "bfloat16": 1e10}}
    for rates, wanted in (({}, "low"), ({"rates": slow}, FULL)):  # the second is a control
        on(name, call=1e-12, **rates)
        found = precisions(attend, *(torch.randn(2, 4, 128, 64) for _ in range(2)), w=torch.randn(64, 64))
        assert found["aten.scaled_dot_product_attention"] == wanted


# -- what the numbers do ------------------------------------------------------------------------------------


def residual(m, x):
    for _ in range(3):
        x = x + F.linear(torch.tanh(F.linear(F.layer_norm(x, (64,)), m.up)), m.down)
    return x


def dtypes(policy):
    graph = capture_function(
        residual, torch.randn(256, 64, requires_grad=True), up=torch.randn(256, 64) / 8, down=torch.randn(64, 256) / 16
    )
    gm = rewritten(graph, policy)
    kinds = ("aten.add", "aten.layer_norm", "aten.linear")
    return {kind: [n.meta["val"].dtype for n, m in marks(gm).items() if m.ops == (kind,)] for kind in kinds}


@pytest.mark.usefixtures("fast_calls")
def test_between_and_beyond_the_words():
    tight, one, wide = (dtypes(f"bf16,accuracy={m}") for m in (0.001, 1, 1000))
    assert {*tight["aten.linear"], *one["aten.add"]} == {FP32}
    assert BF16 in one["aten.linear"]
    assert BF16 in wide["aten.add"]
    assert set(wide["aten.layer_norm"]) == {BF16}


@pytest.mark.parametrize("unit", [1e-18, 1e18])
def test_the_unit_of_the_influence_changes_no_plan(unit):
    problem, dtype = problem_of(captured(0))
    by_rule = influence_by_rule(problem)
    in_units = Influence(
        {read: unit * part for read, part in by_rule.readings.items()},
        {value: unit * part for value, part in by_rule.values.items()},
    )
    slow_calls = replace(machine("cpu_amx"), call=1e-12)
    plain, same = (ErrorBudget(problem, slow_calls, dtype, influence) for influence in (by_rule, in_units))
    assert len({plain.within(multiple).low for multiple in MULTIPLES}) > 1  # they differ at all
    assert [same.within(multiple).low for multiple in MULTIPLES] == [plain.within(m).low for m in MULTIPLES]
