"""The minimum cut against brute force and against networkx: the least cost of every small task, always."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations

import networkx as nx
import pytest

from amp_graph.passes.precision.precision_assignment import (
    FULL_ALWAYS,
    LOW_ALWAYS,
    Task,
    Term,
    cheapest,
    cost,
    full_side,
    is_legal,
)

SEEDS = range(300)


def random_task(seed):
    """3 to 10 operations with every kind of cost, some decided, some limited."""
    draw = random.Random(seed)
    n = draw.randint(3, 10)
    some = lambda: tuple(draw.sample(range(n + 2), draw.randint(0, 3)))  # noqa: E731
    price = lambda: draw.choice((0, 1, 2, 5, 9, 30))  # noqa: E731
    one = lambda: draw.randrange(2, n + 2)  # noqa: E731
    fixed = {FULL_ALWAYS: False, LOW_ALWAYS: True}
    # No low variable is decided below a full one: limits only lead from higher numbers to lower ones.
    fixed |= {i: i < n // 2 for i in range(2, n + 2) if draw.random() < 0.25}
    pairs = [sorted((one(), one()), reverse=True) for _ in range(draw.randint(0, 3))]
    return Task(
        full=(0, 0, *(price() for _ in range(n))),
        low=(0, 0, *(price() for _ in range(n))),
        fixed=fixed,
        limits=tuple((a, b) for a, b in pairs if a != b and not (fixed.get(a) and fixed.get(b) is False)),
        terms=(
            *(term for _ in range(draw.randint(1, 6)) for term in cast(one(), some(), some(), price(), price())),
            *(Term((one(),), (one(),), price()) for _ in range(draw.randint(0, 3))),
            *(term for _ in range(draw.randint(0, 3)) for term in kept(some(), price(), price())),
        ),
    )


def cast(value, lowers, widens, down, up):
    """The costs of the casts of one value."""
    return Term(lowers, (value,), down), Term((value,), widens, up)


def kept(readers, low, full):
    """The costs of saving one value for backward."""
    return Term(readers, (FULL_ALWAYS,), low), Term((LOW_ALWAYS,), readers, full)


def assignments(task):
    """Every legal assignment."""
    inner = range(2, len(task.full))
    every = ({LOW_ALWAYS, *chosen} for size in range(len(inner) + 1) for chosen in combinations(inner, size))
    return [low for low in every if is_legal(task, low)]


def brute(task):
    return min((cost(task, low) for low in assignments(task)), default=None)


@cache
def tasks():
    """(seed, task, what it costs at least by brute force), where there is a legal assignment."""
    found = [(seed, random_task(seed)) for seed in SEEDS]
    return [(seed, task, best) for seed, task in found if (best := brute(task)) is not None]


def wrong_tasks(solve):
    found = [(seed, task, best, solve(task)) for seed, task, best in tasks()]
    return [seed for seed, task, best, low in found if not is_legal(task, low) or cost(task, low) != best]


def test_every_small_task_costs_what_brute_force_finds():
    assert wrong_tasks(cheapest) == []


def test_of_equal_costs_the_lowest_is_chosen():
    for _, task, best in tasks():
        low = cheapest(task)
        assert all(other <= low for other in assignments(task) if cost(task, other) == best)


def test_the_generator_makes_tasks_that_are_worth_solving():
    legal = [task for _, task, _ in tasks()]
    mixed = [task for task in legal if 2 < len(cheapest(task)) < len(task.full) - 1]
    assert len(legal) > 280
    assert len(mixed) > 150
    assert any(task.limits for task in legal)
    terms = [term for task in legal for term in task.terms]
    assert any(map(_is_kept, terms))
    assert any(map(_is_promotion, terms))


def _is_kept(term):
    return term.fulls == (FULL_ALWAYS,) or term.lows == (LOW_ALWAYS,)


def _is_promotion(term):
    return len(term.lows) == len(term.fulls) == 1


def _without(task, kind):
    return replace(task, terms=tuple(term for term in task.terms if not kind(term)))


def _all_low(task):
    free = (0,) * len(task.full)
    return cheapest(Task(free, free, task.fixed, task.limits))


def _cast_each_reader(task):
    """Count a cast once a reader instead of once a value."""
    terms = [replace(t, lows=(a,), fulls=(b,)) for t in task.terms for a in t.lows for b in t.fulls]
    return cheapest(replace(task, terms=tuple(terms)))


BROKEN = {
    "everything as low as may be": _all_low,
    "a cast for each reader": _cast_each_reader,
    "what is kept is forgotten": lambda task: cheapest(_without(task, _is_kept)),
    "promotions are forgotten": lambda task: cheapest(_without(task, _is_promotion)),
    "limits are forgotten": lambda task: cheapest(replace(task, limits=())),
    "casts the other way round": lambda task: cheapest(
        replace(task, terms=tuple(replace(t, lows=t.fulls, fulls=t.lows) for t in task.terms))
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_control_a_broken_planner_is_found_out(name):
    assert len(wrong_tasks(BROKEN[name])) >= 5


def test_what_is_fixed_against_a_limit_is_an_error():
    task = Task((0,) * 4, (0,) * 4, {2: True, 3: False}, limits=((2, 3),))
    with pytest.raises(ValueError, match="break a limit"):
        cheapest(task)


@pytest.mark.parametrize("seed", range(20))
def test_the_flow_is_that_of_networkx(seed):
    draw = random.Random(seed)
    ends = [(LOW_ALWAYS, node) if draw.random() < 0.5 else (node, FULL_ALWAYS) for node in range(2, 62)]
    edges = {end: draw.randint(1, 40) for end in ends}
    for _ in range(200):
        a, b = draw.sample(range(2, 62), 2)
        edges[a, b] = 10**6 if draw.random() < 0.05 else draw.randint(1, 20)
    full = full_side(edges)
    network = nx.DiGraph()
    network.add_weighted_edges_from(((a, b, size) for (a, b), size in edges.items()), weight="capacity")
    cut = sum(capacity for (a, b), capacity in edges.items() if a not in full and b in full)
    assert cut == nx.minimum_cut_value(network, LOW_ALWAYS, FULL_ALWAYS)
