"""The report: what it counts, what it says where nothing happened, and that it is stable and escaped."""

import functools
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.report.graph_facts import split_reason
from amp_graph.report.report_text import fold
from tests.layers import forward_of, layers


@layers(lambda: dict(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), norm=nn.LayerNorm(8)))
def Net(self, x):
    """Layers that fold, an operation of every sort, and one that no list names."""
    for layer in self.layers:
        x = torch.relu(layer(x))
    x = torch.erfinv(self.norm(x).tanh() / 2)
    return x.log_softmax(-1)


@layers(lambda: dict(fc=nn.Linear(8, 8)))
def Broken(self, x):
    x = self.fc(x)
    torch._dynamo.graph_break()
    return self.fc(x)


@forward_of(nn.Module)
def Tokens(self, x):
    return (x + 1).clamp(max=5)


def converted(model, *inputs, policy="bf16"):
    torch.manual_seed(0)
    amp_graph.convert(model, policy)
    for one in inputs:
        model(one)
    return model


@functools.cache
def report_of_net():
    return amp_graph.report(converted(Net(), torch.randn(4, 8)))


def test_a_graphs_counts_agree_with_its_nodes_and_text():
    (graph,) = report_of_net().graphs
    assert (graph.training, graph.grad, graph.dtype, graph.mode) == (
        True,
        True,
        "bf16",
        "train, with gradients",
    )
    linears = [n for n in graph.operations if n.ops == ("aten.linear",)]
    assert [n.module for n in linears] == ["layers.0", "layers.1", "layers.2"]
    for node in linears:
        assert (node.cls, node.precision, node.type, node.captured_type) == (
            "allow",
            "low",
            "bf16[4,8]",
            "f32[4,8]",
        )
        assert node.origin.startswith("common.toml:")
        assert node.reason
        assert __file__ in node.line
        assert f"{node.number}: bf16[4,8] = linear(" in graph.text
    assert [c.source for c in graph.casts if c.of == "weight"] == [
        f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")
    ]
    assert sum(n.cls == "cast" for n in graph.nodes) == len(graph.casts)
    assert "bf16" not in graph.before
    assert graph.captured_bytes > sum(graph.bytes.values()) / 2 > 0


def test_the_text_fits_one_screen_and_says_all():
    text = amp_graph.report(converted(Net(), torch.randn(4, 8), policy="bf16,accuracy=fast")).text()
    for wanted in (
        "amp_graph report: Net",
        "policy     bf16-O1,accuracy=fast",
        "accuracy   fast: low-precision residual streams",
        "precision  bf16, compile=eager",
        "captured   1 graph, 0 graph breaks",
        "graph 0: train, with gradients, bf16",
        "low        100% of the FLOPs of forward",
        "operations   ",
        "low (3 allow",
        "6 of weights)",
        " written, estimated (bf16 ",
        "layers.*",
        "x3",
    ):
        assert wanted in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("  note: ")) <= 110
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("width", [None, 60, 110])
def test_no_reason_is_cut_whatever_the_width(width):
    report = report_of_net()
    text = report.text(width)
    flat = " ".join(text.split())
    assert all(split_reason(n.reason, n.ops)[0] in flat for n in report.graphs[0].operations)
    assert "..." not in text
    assert width is None or max(map(len, text.partition("\n\n")[2].splitlines())) <= width
    assert str(report) == report.text()


class Convolutions(nn.Sequential):
    """Eight layers of a convolution."""

    def __init__(self):
        widths = (3, 8, 8, 8, 16, 16, 16, 16, 16)
        layers = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
        super().__init__(*(part for layer in layers for part in layer), nn.Flatten(), nn.LazyLinear(10))


ENCODER = functools.partial(nn.TransformerEncoder, num_layers=2)
SCREENS = {
    "convolutions": (Convolutions, torch.randn(2, 3, 8, 8), 1, 45),
    "layers": (Net, torch.randn(4, 8), 1, 45),
    "transformer": (
        lambda: ENCODER(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)),
        torch.randn(2, 4, 16),
        2,
        70,
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_graphs_that_differ_in_a_flag_are_one_table_of_reasons(name):
    """Training, without gradients, for other sizes; in eval a TransformerEncoder calls a function of its own."""
    build, x, groups, lines = SCREENS[name]
    model = build()
    model(x)
    converted(model, x, torch.cat((x, x)))
    with torch.no_grad():
        model(x)
        model.eval()(x)
    report = amp_graph.report(model)
    assert len(report.graphs) >= 3
    text = report.text()
    assert all(f"\n{graph.title}\n" in text for graph in report.graphs)
    assert text.count("\n\ngraph ") == groups
    assert len(text.splitlines()) <= lines
    assert report.graphs[1].title.endswith(", symbolic sizes")
    counts = {graph.index: sum(n.precision == "low" for n in graph.operations) for graph in report.graphs}
    rows = re.findall(r"(?:operations|  ) +(?:graphs? ([\d, ]+): )?(\d+) low \(", text)
    assert {int(low) for _, low in rows} == {*counts.values()}
    for numbers, low in rows:
        assert all(counts[int(i)] == int(low) for i in re.findall(r"\d+", numbers))


def test_what_passes_skipped_is_for_those_who_ask():
    report = amp_graph.report(converted(Convolutions(), torch.randn(2, 3, 8, 8)))
    assert report.graphs[0].skips
    assert "skipped" not in report.text()
    flat = " ".join(report.text(skipped=True).split())
    assert all(note.reason in flat for note in report.graphs[0].skips)


def test_the_repr_is_a_line():
    report = report_of_net()
    assert len(repr(report)) < 200
    assert repr(report).startswith("<amp_graph report of Net, policy bf16-O1: 1 graph, ")
    assert "not captured yet" in repr(amp_graph.report(converted(Net())))


def attention(**options):
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)


CALL = "multi_head_attention_forward"
PARTS = {
    "encoder": (lambda: nn.TransformerEncoder(attention(), 2), [(2, 4, 16)], 2),
    "norm first": (lambda: attention(norm_first=True), [(2, 4, 16)], 1),
    "decoder": (lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), [(2, 4, 16), (2, 6, 16)], 2),
    "whole transformer": (lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), [(2, 4, 16), (2, 6, 16)], 3),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,accuracy=fast", "bf16,skip=attention"])
@pytest.mark.parametrize("name", PARTS)
def test_what_is_inside_of_attention_is_named_and_low(name, policy, tmp_path):
    build, sizes, count = PARTS[name]
    model = amp_graph.convert(build(), f"{policy},skip_unprofitable=false")
    model(*map(torch.randn, sizes))
    report = amp_graph.report(model)
    (graph,) = report.graphs
    inside = [n for n in graph.operations if "in multi_head_attention_forward: " in n.reason or CALL == n.call]
    is_whole = CALL in {n.call for n in inside}
    assert is_whole == (policy in ("fp16", "bf16,skip=attention"))
    products = [n for n in inside if "aten.scaled_dot_product_attention" in n.ops]
    assert len(products) == count
    text = " ".join(report.text().split())
    assert f"{CALL if is_whole else 'scaled_dot_product_attention'}{f' x{count}' * (count > 1)} in " in text
    assert {(n.precision, n.cls) for n in inside} == {("low", "allow")}
    floats = [n for n in graph.nodes if n.kind == "operation" and n.type.startswith(("bf16[", "f16["))]
    assert {node.precision for node in floats} == {"low"}
    low = {node.name for node in graph.nodes if node.precision == "low"}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        amp_graph.revert(model)(*map(torch.randn, sizes))
    if not is_whole:
        assert sum(node.flops for node in graph.nodes) == counter.get_total_flops()
        assert sum(node.flops for node in graph.nodes if node.name in low) == counter.get_total_flops()


def test_a_graph_break_names_the_reason_and_the_users_line():
    report = amp_graph.report(converted(Broken(), torch.randn(4, 8)))
    assert len(report.graphs) == 2
    assert "graph_break" in report.graphs[0].break_line
    assert "captured   2 graphs, 1 graph break\n" in report.text()
    assert "ends in a graph break at " in report.text()


def test_operations_that_no_list_names_are_listed_with_their_line():
    report = amp_graph.report(converted(Net(), torch.randn(4, 8), policy="bf16,remove=erfinv"))
    (node,) = [n for n in report.graphs[0].operations if not n.listed]
    assert node.ops == ("aten.erfinv",)
    assert re.search(r"operations that no list names, run as captured:\n +erfinv x1, first at ", report.text())


def test_a_model_without_fp32_has_nothing_to_do():
    text = amp_graph.report(converted(Tokens(), torch.arange(4))).text()
    assert text.endswith("graph 0: train, with gradients, bf16\n  integer-only: nothing to do\n")
    text = amp_graph.report(converted(Tokens(), torch.zeros(4, dtype=torch.float64))).text()
    assert text.endswith("  no fp32 operation: nothing to do\n")


def test_before_the_first_call_there_is_nothing_to_say():
    report = amp_graph.report(converted(Net()))
    assert report.graphs == ()
    assert "not captured yet: call the model once" in report.text()
    report = amp_graph.report(converted(Net(), torch.randn(4, 8), policy="O0"))
    assert "level O0: the model runs unchanged" in report.text()


def test_a_call_that_captured_nothing_is_told_with_its_notes():
    @forward_of(nn.Module)
    def Plain(self, x):
        return x

    model = amp_graph.convert(Plain())
    with pytest.warns(AmpGraphWarning):
        model(torch.ones(2))
    text = amp_graph.report(model).text()
    assert "nothing was captured: every call ran uncaptured" in text
    assert "  note: " in text


@pytest.mark.parametrize(("model", "what"), [
    (nn.Linear(2, 2), "a Linear is not converted"),
    ("model", "a str is not converted"),
    (nn.Sequential(amp_graph.convert(nn.Linear(2, 2))), "its submodule '0' is"),
    (torch.compile(nn.Linear(2, 2), backend="eager"), "a Linear is not converted"),
])  # fmt: skip
def test_a_model_that_is_not_converted_is_refused(model, what):
    with pytest.raises(CaptureError, match=rf"(?s){what}.*fix: .*amp_graph.convert\(model\)"):
        amp_graph.report(model)


compiled = functools.partial(torch.compile, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda m: compiled(nn.DataParallel(m))])
def test_a_wrapped_model_has_the_report_of_what_is_inside(wrap):
    model = amp_graph.convert(nn.Linear(2, 2), "bf16")
    outer = wrap(model)
    assert amp_graph.report(outer).graphs == ()
    model(torch.ones(2, 2)).sum().backward()
    assert amp_graph.report(outer).graphs == amp_graph.report(model).graphs != ()


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_the_graphs_of_the_backend_are_in_the_report_of_their_model(compile, tmp_path):
    torch._dynamo.reset()  # it would run the graph of an earlier model
    outer = torch.compile(Net(), backend="amp_graph", options={"policy": "bf16", "compile": compile})
    outer(torch.randn(4, 8)).sum().backward()
    converted = amp_graph.convert(Net(), "bf16", compile=compile)
    converted(torch.randn(4, 8)).sum().backward()
    found, expected = amp_graph.report(outer), amp_graph.report(converted)
    assert (found.model, found.compile, found.dtype) == ("Net", f"backend amp_graph, {compile}", "bf16")
    (graph,), (same,) = found.graphs, expected.graphs
    reasons = [
        {(n.ops, n.precision, n.reason.replace("l_forward_", "l_")) for n in one.operations} for one in (graph, same)
    ]
    assert reasons[0] == reasons[1]
    assert Counter(cast.of for cast in graph.casts) == Counter(cast.of for cast in same.casts)
    assert f"train, {graph.mode}" == same.mode
    with torch.no_grad():
        outer(torch.randn(4, 8))
    assert [one.mode for one in amp_graph.report(outer).graphs] == ["with gradients", "without gradients"]
    amp_graph.report(outer).html(tmp_path / "report.html")
    assert "without gradients" in amp_graph.report(outer).text()
    with pytest.raises(CaptureError, match="has no graph of it"):
        amp_graph.report(torch.compile(Net(), backend="amp_graph"))


def test_a_compiled_call_of_a_converted_model_is_in_its_report():
    outer = compiled(amp_graph.convert(nn.Linear(2, 2), "bf16"))
    outer(torch.ones(2, 2)).sum().backward()
    found = amp_graph.report(outer)
    assert (found.model, len(found.graphs)) == ("Linear", 1)


def test_the_dict_is_json_and_the_same_for_two_fresh_conversions():
    first, second = (amp_graph.report(converted(Net(), torch.randn(4, 8))).to_dict() for _ in range(2))
    text = json.dumps(first)
    assert text == json.dumps(second)
    back = json.loads(text)
    assert back["format"] == 2
    assert back["graphs"][0]["nodes"][0].keys() >= {"name", "ops", "module", "precision", "reason", "origin"}
    assert [len(back["graphs"][0][k]) for k in ("nodes", "captured")] == [
        len(first["graphs"][0][k]) for k in ("nodes", "captured")
    ]
    assert sum(node["kind"] == "cast" for node in back["graphs"][0]["nodes"]) > 0


def test_operations_of_one_reason_are_one_line():
    @layers(lambda width: dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width)))
    def Block(self, x):
        return self.down(nn.functional.gelu(self.up(x)))

    model = converted(nn.Sequential(Block(64), nn.Linear(64, 512), Block(512)), torch.randn(256, 64))
    (graph,) = amp_graph.report(model).graphs
    (row,) = [row for row in fold(graph.operations) if row[0] == "gelu"]
    assert row[:2] == ("gelu", "x2")
    assert row[4].endswith("; at the least predicted time")


def test_a_shared_cast_is_counted_as_a_cast():
    @layers(lambda: dict(norm=nn.LayerNorm(64), one=nn.Linear(64, 64), two=nn.Linear(64, 64)))
    def Reads(self, x):
        h = self.norm(x)
        return self.one(h) + self.two(h)

    (graph,) = amp_graph.report(converted(Reads(), torch.randn(8, 64))).graphs
    assert "shared_cast" in graph.text
    assert sorted(c.to for c in graph.casts if c.of == "activation") == [
        "bf16",
        "f32",
    ]  # the latter of what is returned


def test_the_docs_name_every_key_of_the_plain_value():
    text = (Path(amp_graph.__file__).parents[1] / "docs" / "inspecting.md").read_text()
    told = report_of_net().to_dict()
    (graph,) = told["graphs"]
    keys = {*told, *told["summary"], *graph, *graph["nodes"][0], *graph["captured"][0]}
    assert [key for key in keys if f"`{key}`" not in text] == []
