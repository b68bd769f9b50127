"""The page of a report, without a browser: what its first screen answers, what its data hold, and that it is closed."""

import base64
import hashlib
import html
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphError, AmpGraphWarning
from amp_graph.report import report_html
from amp_graph.report.records import Collective
from amp_graph.report.report_html import html_page, page_place
from tests.layers import layers
from tests.report.pages import Page, copies_of

EVIL = "</script><script>alert(1)</script><!--"


@layers(lambda: dict(norm=nn.LayerNorm(64), fc=nn.Linear(64, 64)))
def Layer(self, x):
    return x + self.fc(self.norm(x)).relu()


@layers(lambda: dict(layers=nn.ModuleList(Layer() for _ in range(3))))
def Net(self, x):
    for layer in self.layers:
        x = layer(x)
    return x.double().float().log_softmax(-1).double()  # casts of the user's own, two without effect


@pytest.fixture(scope="module")
def told():
    torch.manual_seed(0)
    model = amp_graph.convert(Net(), "bf16")
    model(torch.randn(32, 64)).sum().backward()
    return amp_graph.report(model, times={"fp32": 0.2, "torch.autocast": 0.15, "amp_graph": 0.1})


@pytest.fixture(scope="module")
def page(told):
    return Page(html_page(told))


def test_the_first_screen_answers_in_order(told, page):
    text = page.text()
    wanted = ["In low precision", "FLOPs", "Bytes", "Casts", "Speed against fp32", "Memory", "Notes", "Model"]
    places = [text.index(word) for word in wanted]
    assert places == sorted(places)
    (graph,) = told.graphs
    share = page.text("card-share")
    assert share.startswith("In low precision FLOPs 100.0 %")
    low = graph.bytes["bf16"] / sum(graph.bytes.values())
    assert f"Bytes {100 * low:.1f} %" in share
    assert page.text("card-casts").startswith(f"Casts 3 → {len(graph.casts) + 1} ")
    assert f"activations, at each call {sum(c.of == 'activation' for c in graph.casts)}" in page.text("card-casts")
    assert "your own 1 stay, 2 removed" in page.text("card-casts")
    times = page.text("card-time")
    assert re.search(
        r"fp32 1\.00 × 1\.00 × 200 ms torch\.autocast [\d.]+ × 1\.33 × 150 ms amp_graph [\d.]+ × 2\.00 × 100 ms", times
    )
    assert "parameters" in page.text("card-memory")
    assert "activations written" in page.text("card-memory")


def test_predicted_times_are_those_of_the_plan(told):
    (graph,) = told.graphs
    found = graph.predicted
    assert found.full > 0
    rows = {row["name"]: row["predicted"] for row in told.summary()["speeds"]}
    assert rows == pytest.approx({"fp32": 1.0, "torch.autocast": found.autocast, "amp_graph": found.speed})
    assert found.speed >= found.autocast / 1.2  # by cost: it is the plan of least cost, and its call counts too


def test_both_sides_of_the_graph_are_in_the_data(told, page):
    (graph,) = told.graphs
    assert page.column("name") == [node.name for node in graph.nodes]
    reasons = dict(zip(page.column("name"), page.column("words"), strict=True))
    assert all(reasons[node.name] for node in graph.nodes if node.ops)
    assert len(page.column("edges")) == 2 * sum(len(node.sources) for node in graph.nodes)
    lines = graph.before.splitlines()
    assert page.column("number", side="before") == [f"%{i}" for i in range(len(lines))]
    for number, op, kind, line in zip(
        *(page.column(c, side="before") for c in ("number", "op", "kind")), lines, strict=True
    ):
        assert kind == "output" or (line.startswith(f"{number}: ") and f"{op}" in line)
    assert page.column("kind", side="before").count("cast") == 3
    shared = {*page.column("name")} & {*page.column("name", side="before")}
    assert {n.name for n in graph.operations} <= shared


def test_reasons_are_words_and_prices_apart(page):
    found = {
        (words, figures) for words, figures in zip(page.column("words"), page.column("figures"), strict=True) if figures
    }
    assert found
    assert not any(re.search(r"\d us (?:cheaper|more)", words) for words, _ in found)
    casts = {w for w, kind in zip(page.column("words"), page.column("kind"), strict=True) if kind == "cast"}
    assert casts <= {
        "aten.linear takes low precision",
        "aten.add takes full precision",
        "aten._to_copy takes full precision",
    } | {w for w in casts if "(" not in w}


def test_paths_are_relative(page):
    lines = [line for line in page.column("line") if line]
    assert any(line.startswith("tests/report/test_page.py:") for line in lines)
    assert not any(line.startswith("/") for line in lines)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/home/me/work/train.py:3, in forward: x = a / b", ".../work/train.py:3, in forward: x = a / b"),
        ("/home/me/lib/python3.11/site-packages/pack/sub/a.py:1: y", "pack/sub/a.py:1: y"),
        ("C:\\work\\nets\\train.py:3: y", "...\\nets\\train.py:3: y".replace("...\\", ".../")),
        ("/train.py:3: y", "/train.py:3: y"),
        ("nets/train.py:3: open('/a/b/c.py:1')", "nets/train.py:3: open('/a/b/c.py:1')"),
        ("<string>:1: x", "<string>:1: x"),
        ("", ""),
    ],
)
def test_a_place_has_no_absolute_path(place, shown):
    assert page_place(place) == shown


def test_the_page_is_closed_and_fetches_nothing(page):
    assert page.open == []
    assert page.links == []
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    for script in page.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules["script-src"]
    assert "unsafe" not in rules["script-src"]
    code = re.sub(r"/\*.*?\*/", "", "".join(page.scripts), flags=re.DOTALL)  # licences name their sites
    assert not re.search(r"https?://|\bfetch\(|XMLHttpRequest|import\(|WebSocket|innerHTML|\beval\(", code)
    assert not re.search(r"url\((?!#)|@import|https?://", re.search(r"<style>(.*?)</style>", page.source, re.DOTALL)[1])


def test_hostile_names_and_reasons_stay_text(told):
    (graph,) = told.graphs
    changes = {"module": EVIL, "reason": EVIL, "call": EVIL, "line": f"/x/site-packages/a.py:1: {EVIL}"}
    nodes = tuple(replace(node, **changes) if node.ops else replace(node, call=EVIL) for node in graph.nodes)
    evil = replace(
        told,
        model=EVIL,
        notes=(EVIL,),
        skipped=((EVIL, EVIL),),
        breaks=((EVIL, EVIL),),
        escaped=EVIL,
        times={EVIL: 1.0},
        collectives=(Collective(EVIL, EVIL, EVIL, 3, 1, EVIL),),
        memory={EVIL: 3},
        graphs=(replace(graph, nodes=nodes, break_reason=EVIL, dtype=EVIL),),
    )
    page = Page(html_page(evil))
    assert page.open == []
    assert "<script>alert" not in page.source
    assert page.tags.count("script") == 4
    assert {*page.column("module")} == {"", EVIL}
    assert EVIL in page.column("words")
    assert f"a.py:1: {EVIL}" in page.column("line")
    assert page.text().count(EVIL) >= 8


def test_hostile_names_of_a_real_model_stay_text(tmp_path):
    evil = type(
        "<script>alert(1)</script>", (nn.Module,), {"forward": lambda self, x: self.get_submodule("<img src=x>")(x)}
    )
    model = evil()
    model.add_module("<img src=x>", nn.Linear(8, 8))
    with pytest.warns(AmpGraphWarning, match="matches no module"):
        amp_graph.convert(model, "bf16,keep_fp32=<b>&.*")(torch.randn(4, 8))
    amp_graph.report(model).html(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == page.links == []
    assert not {"img", "b x"} & {*page.tags}
    assert "<script>alert(1)</script>" in page.text()
    assert "keep_fp32=<b>&.*" in page.text()


def test_without_a_graph_the_page_says_why():
    page = Page(html_page(amp_graph.report(amp_graph.convert(nn.Linear(2, 2), "bf16"))))
    assert "not captured yet: call the model once" in page.text()
    assert page.data == {"strings": [""], "graphs": []}
    assert page.open == []


def test_a_graph_that_is_slower_says_so_on_the_first_screen(told):
    (graph,) = told.graphs
    slow = replace(told, graphs=(replace(graph, predicted=replace(graph.predicted, speed=0.7)),))
    page = Page(html_page(slow))
    assert "low precision is not profitable on" in page.text("card-time")
    ours = page.source.split('<tr class="ours">')[1].split("</tr>")[0]
    assert re.findall(r'<span class="(\w+)" style', ours) == ["slower", "time"], "predicted, and measured: twice fp32's"


def test_a_step_with_a_loss_scale_says_its_state():
    model = nn.Linear(8, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp_graph.TrainStep(model, lambda out, y: (out - y).square().mean(), sgd, policy="fp16")
    step(torch.randn(4, 8), torch.randn(4, 8))
    notes = amp_graph.report(step).notes
    assert any(re.fullmatch(r"loss scale: \d+ now, 0 steps skipped", note) for note in notes)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), "fast", None])
def test_a_time_that_is_none_is_refused(bad):
    model = amp_graph.convert(nn.Linear(2, 2), "bf16")
    with pytest.raises(AmpGraphError, match="the time of fp32 is"):
        amp_graph.report(model, times={"fp32": bad})


def test_without_jinja_the_error_names_the_package(told, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    report_html.template.cache_clear()
    with pytest.raises(AmpGraphError, match=r"jinja2.*not installed[\s\S]*pip install 'amp-graph\[report\]'"):
        html_page(told)
    assert told.text()


def test_a_notebook_shows_the_page_in_a_frame(told):
    frame = told._repr_html_()
    page = re.fullmatch(r'<iframe sandbox="allow-scripts" style="[^"]*" srcdoc="([^"]*)"></iframe>', frame)
    assert html.unescape(page[1]) == html_page(told)


def test_the_same_report_is_the_same_page(told):
    assert html_page(told) == html_page(told)


def test_a_page_of_5000_nodes_is_small(told):
    page = Page(html_page(copies_of(told, -(-5000 // len(told.graphs[0].nodes)))))
    assert len(page.column("name")) >= 5000
    assert len(page.source) < 2_000_000
