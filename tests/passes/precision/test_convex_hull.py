"""The walk along the hull against brute force: every assignment of small tasks, every bound that matters."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from amp_graph.passes.precision.convex_hull import Point, Tradeoff
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, Task, Term, is_legal
from tests.passes.precision.test_precision_assignment import assignments, random_task

SEEDS = range(120)


def random_harm(seed, task):
    """What a low variable rounds, and what the cast of a value rounds for each reader."""
    draw = random.Random(1000 + seed)
    n = len(task.full)
    size = lambda: draw.choice((0, 1, 3, 10, 40, 41))  # noqa: E731
    pairs = [draw.sample(range(2, n), 2) for _ in range(draw.randint(1, 6))]
    casts = tuple(Term((draw.choice((b, LOW_ALWAYS)),), (a,), size()) for a, b in pairs)
    return Task((0,) * n, (0, 0, *(size() for _ in range(n - 2))), task.fixed, task.limits, casts)


def twice(task):
    """Two of the same task in one: parts of it are on one edge of the hull."""
    n = len(task.full)
    other = lambda group: tuple(i if i < 2 else i + n - 2 for i in group)  # noqa: E731
    return Task(
        task.full + task.full[2:],
        task.low + task.low[2:],
        {**task.fixed, **{i + n - 2: is_low for i, is_low in task.fixed.items() if i >= 2}},
        (*task.limits, *map(other, task.limits)),
        (*task.terms, *(replace(t, lows=other(t.lows), fulls=other(t.fulls)) for t in task.terms)),
    )


@cache
def tasks():
    """(seed, trade-off, all its legal assignments); small tasks come twice in one"""
    found = []
    for seed in SEEDS:
        task = random_task(seed)
        harm = random_harm(seed, task)
        made = Tradeoff(twice(task), twice(harm)) if len(task.full) <= 7 else Tradeoff(task, harm)
        every = [made.point(low) for low in assignments(made.costs)]
        if every:
            found.append((seed, made, every))
    return found


def vertices(every):
    """The corners of the lower convex hull of (harm, cost), from the least harmful to the cheapest."""
    hull, best = [], None
    for p in sorted(every, key=lambda p: (p.harm, p.cost)):
        if best is not None and p.cost >= best:
            continue
        best = p.cost
        while len(hull) > 1 and above(hull[-2], hull[-1], p) >= 0:
            hull.pop()
        hull.append(p)
    return hull


def above(a, b, c):
    """How far b is above the line from a to c (0: on it, negative: below), times a positive number."""
    return (b.cost - a.cost) * (c.harm - a.harm) - (c.cost - a.cost) * (b.harm - a.harm)


def bounds(every):
    harms = sorted({p.harm for p in every})
    return sorted({0, *harms, *(h - 1 for h in harms), harms[-1] + 7})


def wrong(solve):
    """The tasks for which ``solve(trade-off, bound)`` is not what its docstring says, at any bound."""
    return [
        seed
        for seed, made, every in tasks()
        if not all(_is_right(solve(made, bound), bound, made, every) for bound in bounds(every))
    ]


def _is_right(got, bound, made, every):
    within = [p for p in every if p.harm <= bound]
    if not is_legal(made.costs, got.low) or got != made.point(got.low):
        return False
    if not within:
        return got.harm == min(p.harm for p in every)
    vertex = min(p.cost for p in vertices(every) if p.harm <= bound)
    return got.harm <= bound and min(p.cost for p in within) <= got.cost <= vertex


def test_every_bound_of_every_small_task_is_kept_at_no_more_than_the_hulls_cost():
    assert wrong(Tradeoff.within) == []


def test_what_is_found_lies_on_the_hull():
    for seed, made, every in tasks():
        hull = vertices(every)
        found = {made.within(bound) for bound in bounds(every)}
        for harm, cost in {(p.harm, p.cost) for p in found} - {(p.harm, p.cost) for p in hull}:
            p = Point(frozenset(), cost, harm)
            assert any(a.harm < harm < b.harm and above(a, p, b) == 0 for a, b in pairwise(hull)), seed


BROKEN = {
    "harm is ignored": lambda made, bound: made.fastest(),
    "only harm counts": lambda made, bound: made.safest(),
    "the bound is halved": lambda made, bound: made.within(bound // 2),
    "harm of casts is ignored": lambda made, bound: made.point(
        Tradeoff(made.costs, replace(made.harm, terms=())).within(bound).low
    ),
    "harm of results is ignored": lambda made, bound: made.point(
        Tradeoff(made.costs, replace(made.harm, low=made.harm.full)).within(bound).low
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_control_a_broken_planner_is_found_out(name):
    assert len(wrong(BROKEN[name])) >= 10
