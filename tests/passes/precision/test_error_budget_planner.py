"""Error budgets on real graphs: kept, never slower than the plans they span, and found out where harm is ignored."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.cli.command_plan import count_casts
from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.graph.meta_keys import BUDGET, CAST
from amp_graph.passes.precision.build_assignment import low_of
from amp_graph.passes.precision.convex_hull import Tradeoff
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.precision.planning_problem import FULL
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, is_legal
from amp_graph.passes.precision.sensitivity import Influence, influence_by_rule
from tests.corpus import make
from tests.passes.graphs import BF16, FP32, capture_function, passes_until, rewritten
from tests.passes.planning import machine, problem_of, problems_of
from tests.passes.precision.test_convex_hull import bounds, vertices
from tests.passes.programs import captured

SEEDS = range(40)
MULTIPLES = (0.01, 0.5, 0.9, 1.0, 1.2, 1.5, 2.0, 1000.0)


@cache
def budgets(seed, on="cpu_amx", policy="bf16"):
    """The plans of one random program; a fast machine for low precision, on which small operations differ, too."""
    problem, dtype = problem_of(captured(seed), policy)
    slow_calls = replace(machine(on), call=1e-12)  # or else nothing so small is worth a cast
    return ErrorBudget(problem, slow_calls, dtype)


@cache
def brute_forced():
    """Each program with nine choices left, the others as autocast's plan has them, and all assignments of those."""
    found = []
    for seed, draw in product(SEEDS, range(2)):
        made = budgets(seed)
        costs = made.plans.costs
        free = sorted({*range(len(costs.full))} - set(costs.fixed))
        chosen = random.Random(seed + 1000 * draw).sample(free, min(9, len(free)))
        fixed = {i: i in made.autocast.low for i in range(len(costs.full)) if i not in chosen}
        plans = Tradeoff(replace(costs, fixed=fixed), replace(made.plans.harm, fixed=fixed))
        decided = {i for i, is_low in fixed.items() if is_low}
        sets = ({*decided, *some} for size in range(len(chosen) + 1) for some in combinations(chosen, size))
        found.append((plans, [plans.point(low) for low in sets if is_legal(plans.costs, low)]))
    return found


def wrong(within):
    """How many small problems have a budget for which ``within(plans, bound)`` is not as promised."""
    count = 0
    for plans, points in brute_forced():
        hull = vertices(points)
        for bound in bounds(points):
            got = within(plans, bound)
            fits = [p.cost for p in points if p.harm <= bound]
            corner = min((p.cost for p in hull if p.harm <= bound), default=None)
            if corner is not None and not (
                is_legal(plans.costs, got.low) and got.harm <= bound and min(fits) <= got.cost <= corner
            ):
                count += 1
                break
    return count


@pytest.mark.slow
def test_what_is_found_costs_no_more_than_the_hull_of_all_assignments():
    assert sum(len(vertices(points)) > 2 for _, points in brute_forced()) >= 10
    assert wrong(Tradeoff.within) == 0


@pytest.mark.slow
def test_control_a_planner_that_ignores_harm_is_found_out():
    assert wrong(lambda plans, bound: plans.fastest()) >= 8
    assert wrong(lambda plans, bound: plans.safest()) >= 5


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
    for p in found.values():
        assert low_of(made.choices(p), made.made) == p.low
    return len({p.low for p in found.values()})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("on", ["cpu_amx", "cpu_bf16", "cuda"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_random_programs_keep_their_budgets(policy, on):
    differing = [keeps_its_promises(budgets(seed, on, policy)) for seed in SEEDS]
    assert policy != "bf16" or sum(n > 1 for n in differing) >= 10


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
def on(monkeypatch):
    """Plan for a machine whose calls cost nothing, so that small operations are worth a choice."""

    def choose(name):
        made = replace(machine(name), call=1e-12)
        monkeypatch.setattr("amp_graph.passes.precision.plan_precision.machine_for", lambda device: made)

    choose("cpu_amx")
    return choose


@pytest.mark.parametrize("multiple", [0.5, 1.0, 3.0])
def test_the_graph_is_what_was_planned_and_has_the_casts_that_were_counted(on, multiple):
    compared = 0
    for seed in SEEDS:
        gm, done = captured(seed).through(passes_until(InsertCasts, f"bf16,accuracy={multiple}"))
        if any(c.action == "kept full" for c in done[-1].result.changes):  # a kernel refused, which no plan knows
            continue
        compared += 1
        made = budgets(seed)
        plan = made.within(multiple)
        assert gm.meta[BUDGET] == made.budget(multiple, plan), seed
        casts = [n for n in gm.graph.nodes if CAST in n.meta]
        assert len({(n.args[0].name, n.meta["val"].dtype) for n in casts}) == count_casts(made, plan), seed
    assert compared >= 25


def test_a_value_that_several_full_sums_promote_is_cast_once():
    state = {name: torch.randn(16, 16) for name in "uvw"}

    def sums(s, x):
        shared = x @ s.u
        return shared + x @ s.v, shared + x @ s.w

    given = capture_function(sums, torch.randn(8, 16), **state)
    problem, dtype = problem_of(given)
    made = ErrorBudget(problem, machine("cpu_amx"), dtype)
    low = frozenset(i for node, i in made.made.of.items() if node.name.startswith(("shared", "matmul")))
    assert len(low) == 3
    assert count_casts(made, SimpleNamespace(low=low | {LOW_ALWAYS})) == 4 + 1, "the input, the weights, one product"


# -- what is never rounded ----------------------------------------------------------------------------------


def precisions(function, *inputs, policy="bf16,accuracy=1000,deny=exp", **state):
    gm = rewritten(capture_function(function, *inputs, **state), policy)
    return {op: m.precision for m in marks(gm).values() for op in m.ops}


def test_deny_operations_stay_full(on):
    w = torch.randn(512, 512)
    found = precisions(lambda m, x: F.linear(F.linear(x, m.w).exp(), m.w), torch.randn(512, 512), w=w)
    assert (found["aten.linear"], found["aten.exp"]) == ("low", FULL)


def test_no_table_is_rounded_for_a_gather_and_nothing_for_a_selection(on):
    def f(m, i):
        rows = F.embedding(i, m.table) * 1.5
        return F.linear(rows + rows.amax(-1, keepdim=True), m.w)

    found = precisions(f, torch.arange(512) % 8, table=torch.randn(8, 512), w=torch.randn(512, 512))
    assert found["aten.embedding"] == found["aten.mul"] == found["aten.amax"] == FULL
    assert found["aten.linear"] == "low"


@pytest.mark.parametrize("name", ["cpu_bf16", "cpu_amx"])
def test_attention_is_low_where_ours_is_the_kernel(on, name, monkeypatch):
    """Of the time alone: torch's kernel of bf16, whose rate plans went by, is slower than that of fp32."""
    on(name)
    given = [torch.randn(2, 4, 128, 64) for _ in range(2)]
    w = torch.randn(64, 64)

    def attend(m, x, y):
        return F.linear(F.scaled_dot_product_attention(F.linear(x, m.w), F.linear(y, m.w), F.linear(x, m.w)), m.w)

    assert precisions(attend, *given, w=w)["aten.scaled_dot_product_attention"] == "low"
    slow = replace(
        machine(name), call=1e-12, rates={**machine(name).rates, "attention": {"float32": 6e10, "bfloat16": 1e10}}
    )
    monkeypatch.setattr("amp_graph.passes.precision.plan_precision.machine_for", lambda device: slow)
    assert precisions(attend, *given, w=w)["aten.scaled_dot_product_attention"] == FULL, "control"


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


def test_between_and_beyond_the_words(on):
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
