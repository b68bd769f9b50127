"""The page of a search: a point for each policy that ran, the budget as a line, and the table."""

import math

import pytest

from amp_graph.search.result import SearchResult
from amp_graph.search.trials import AUTOCAST, FULL, Goal, Trial

TRIALS = (
    Trial(FULL, 1.0, 0.0, why="what all others are compared with"),
    Trial("bf16-O1", 0.6, 0.004, why="the default plan"),
    Trial("bf16-O1,accuracy=1.3", 0.5, 0.0052, why="1.9 times fp32's speed expected"),
    Trial("bf16-O1,accuracy=fast", 0.45, 0.4, why="<b>2.2</b> times fp32's speed expected"),
    Trial("fp16-O1", math.inf, math.inf, math.inf, why="fails: a value is not finite"),
)
OWN = Trial(AUTOCAST, 0.55, 0.005, why="torch's own, to compare")


def test_each_policy_is_a_point_and_a_row(open_page, tmp_path):
    goal, answer = Goal(error=0.0055), TRIALS[2].policy
    SearchResult(answer, TRIALS, goal, OWN, 0.01, 0.0053, "cpu_amx", "its limit").html(tmp_path / "search.html")
    page = open_page(tmp_path / "search.html", "search")
    assert page.text("h1").startswith(f"{answer}: 2.00 times fp32's speed")
    points = page.all("svg circle")
    assert [one.get_attribute("class") for one in points] == [
        "good",
        "good",
        "answer",
        "over",
        "own",
    ]  # none of what failed
    places = [(float(one.get_attribute("cx")), float(one.get_attribute("cy"))) for one in points]
    assert [x for x, _ in places[:4]] == sorted((x for x, _ in places[:4]), reverse=True)
    assert places[2][0] < places[4][0] < places[1][0]
    (line,) = page.all("svg .limit")
    limit = float(line.get_attribute("y1"))
    assert all(y >= limit for _, y in places[:3])
    assert 0 <= places[3][1] < limit  # far beyond the budget: at the edge, not outside
    assert points[2].rect["x"] < points[1].rect["x"]
    rows = page.all(".tried tbody tr")
    assert [row.find_elements("css selector", "td")[5].text for row in rows] == [
        "no: slower", "no: slower", "the answer", "no: 72.7 times the budget", "no: fails", "to compare",
    ]  # fmt: skip
    assert page.text("pre") == f'use:   model = amp_graph.convert(model, "{answer}")'
    assert not page.all("td b")  # the text of users is text
    page.picture("search.png")


@pytest.mark.parametrize("goal", [Goal(metric=0.1), Goal(metric=-3.0), Goal(error=0.0), Goal()])
def test_any_budget_can_be_drawn(open_page, tmp_path, goal):
    trials = [Trial(FULL, 1.0, 0.0, -4.0), Trial("bf16-O1", 0.5, 0.01, math.inf)]
    SearchResult(
        FULL, trials, goal, Trial(AUTOCAST, math.inf, math.inf, math.inf), 0.01, math.nan, "cpu", "its limit"
    ).html(tmp_path / "search.html")
    page = open_page(tmp_path / "search.html", "search")
    places = [float(one.get_attribute("cy")) for one in page.all("svg circle")]
    assert len(places) == 2
    assert all(-1 <= y <= 301 for y in places)
