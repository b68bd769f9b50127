"""The views of an audit: text at 80 columns, the table of precisions, the page, and the data with its keys."""

import gc
import json
import re
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.audit.audit_text import WIDTH
from amp_graph.audit.codes import CODES
from amp_graph.audit.precision_table import Row
from amp_graph.audit.records import LEVELS, Finding, Place
from amp_graph.errors import AmpGraphError
from tests.audit.running import faults_in, keys_of, keys_of_the_docs, trained
from tests.layers import layers

LONG = "encoder.layers.0.attention.self.query_projection_with_a_long_name"
SOME = ("value <b>&amp;</b>: " + "half of the elements of " * 6).strip()


@layers(lambda: dict(norm=nn.LayerNorm(16), fc=nn.Linear(16, 16)))
def Block(self, x):
    return x + self.fc(self.norm(x)).relu()


@layers(lambda depth=3: dict(blocks=nn.ModuleList(Block() for _ in range(depth)), head=nn.Linear(16, 4)))
def Net(self, x):
    for block in self.blocks:
        x = block(x)
    return self.head(x.half().float())


def audited(model=None, steps=4, dtype=torch.bfloat16, call=None, **options):
    """Return the report of a training of ``model`` by AdamW under autocast."""
    torch.manual_seed(0)
    model = Net() if model is None else model

    def loss():
        x = torch.randn(8, 16)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            return (model(x) if call is None else call(model, x)).float().square().mean()

    return trained(loss, model.parameters(), steps, torch.optim.AdamW, **options).report()


def finding(code="AMP101", level="warning", file="train.py", line=42, text=SOME, **others):
    return Finding(code, level, Place(file, line), text, "cast it back", {"share": 0.5, "steps": [2, 3]}, **others)


@pytest.fixture(scope="module")
def report():
    made = audited()
    findings = [
        *(finding(line=n, also=(f"{LONG}.{n}", *"abcdef")) for n in range(1, 20)),
        replace(finding(level="error", file=f"{LONG}/model.py"), fix="another"),
    ]
    return replace(made, findings=findings, plan=("Plan", "  12 casts", "  amp-graph run --policy bf16 train.py"))


def rows_by_name(report):
    return {row.module: row for row in report.rows}


def test_no_line_of_the_text_is_longer_than_a_terminal(report):
    lines = report.text().splitlines()
    too_long = [line for line in lines if len(line) > WIDTH and LONG not in line and "text" not in line]
    assert too_long == []


def test_a_full_table_is_no_wider_than_a_terminal(report):
    names = ["float32", "bfloat16", "float8_e4m3fn"]
    counts = {name: Counter(dict.fromkeys(names, 123_456)) for name in report.rows[0].counters()}
    counts["decided"] = Counter({f"cast at train.py:{n}": 1 for n in range(30)})
    rows = [Row(f"layers.{n}.attention.projection.of.queries", **counts) for n in range(3)]
    lines = replace(report, rows=[*rows, Row("", **counts)], findings=()).text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "  layers.*.attention.projection.of.queries x3" in lines


def test_the_verdict_comes_first_and_says_which_steps_were_seen(report):
    assert report.text().splitlines()[0] == "amp_graph audit: 1 error, 19 warnings; looked at steps 2, 3 of 4"
    seen = replace(audited(looks=(1,)), findings=())
    for made, told in (
        (replace(audited(looks=()), findings=()), "nothing was looked at: 4 steps ended, and none was to be"),
        (
            replace(report, looked_at=(), looks=(2, 11, 23), every=101, silenced=1),
            "nothing was looked at: 4 steps ended, and the 2nd, 11th, 23rd and each 101st were to be; 1 error, 19 "
            "warnings (1 silenced)",
        ),
        (
            replace(report, findings=(), steps=500, looked_at=(2, 3, 100, 200, 300, 400, 501)),
            "no findings; looked at steps 2, 3, 100, ..., 400 of 500, and at what ran after step 500, the last that "
            "ended",
        ),
        (replace(seen, silenced=3), "no findings (3 silenced); looked at step 1 of 4"),
    ):
        first = made.text().partition("\n\n")[0]
        assert " ".join(first.split()) == f"amp_graph audit: {told}"
        assert max(map(len, first.splitlines())) <= WIDTH


def test_findings_have_their_title_once_a_line_each_and_their_fix(report):
    text = report.text()
    assert text.count(CODES["AMP101"].title) == 1
    assert "\n  train.py:1: AMP101 warning: value <b>" in text
    assert "and at 8 more places" in text
    assert text.count("fix: cast it back") == 12
    assert text.count("fix: another") == 0, "the twentieth place is not shown"
    one = replace(report, findings=[finding(), finding(line=50)]).text()
    assert one.count("fix: cast it back") == 1, "one fix for all places is said once"


def test_the_table_says_what_is_stored_computed_saved_and_kept():
    report = audited()
    rows = rows_by_name(report)
    fc, norm, head = rows["blocks.1.fc"], rows["blocks.0.norm"], rows["head"]
    assert {*fc.parameters} == {*fc.gradients} == {*fc.states} == {"float32"}
    assert {*fc.forward} == {*fc.backward} == {*fc.flops} == {*fc.saved} == {"bfloat16"}
    assert {*norm.forward} == {"float32"}
    assert fc.parameters["float32"] == 4 * (16 * 16 + 16)
    assert fc.states["float32"] == 2 * fc.parameters["float32"], "the count of steps is no state"
    # Forward, the gradient of the weight and that of the input, each 2 * 8 * 16 * 16, in two steps.
    assert sum(fc.flops.values()) == 2 * 3 * 2 * 8 * 16 * 16
    assert [key.startswith("autocast(cpu, bfloat16) at tests/audit/test_views.py:") for key in head.decided] == [True]
    assert [key.startswith("cast at tests/audit/test_views.py:") for key in rows[""].decided] == [True, True]
    text = report.text()
    assert re.search(r"^  blocks\.\*\.fc x3 +fp32 +bf16 x6 +\d+% bf16 +fp32 +fp32 +1$", text, re.MULTILINE)
    assert re.search(r"^  \[1\] autocast\(cpu, bfloat16\) at tests/audit/test_views.py:\d+$", text, re.MULTILINE)


def test_a_module_with_nothing_to_show_has_no_row(report, tmp_path):
    empty = [Row("pooler", backward=Counter({"float32": 2}))]
    cast = Row("pooled", decided=Counter({"cast at train.py:3": 1}))
    made = replace(report, rows=[*report.rows, *empty, cast])
    assert "pooler" not in made.text()
    assert re.search(r"^  pooled +\d+$", made.text(), re.MULTILINE)
    made.html(tmp_path / "audit.html")
    assert "pooler" not in (tmp_path / "audit.html").read_text()
    assert replace(report, rows=empty).text().count("Precisions") == 0


def test_layers_with_other_dtypes_than_their_sisters_have_a_row_of_their_own():
    model = Net()
    model.blocks[1].fc.bfloat16()
    text = audited(model).text()
    assert re.search(r"^  blocks\.\*\.fc x2 +fp32 ", text, re.MULTILINE)
    assert re.search(r"^  blocks\.1\.fc +bf16 +bf16 .* bf16 +bf16 +bf16 ", text, re.MULTILINE)


def test_what_is_saved_for_backward_is_what_autograd_keeps():
    """Against the bytes that saved-tensor hooks see in a step of its own."""
    model, seen = Net(), {}

    def pack(t):
        if t.is_floating_point() and not isinstance(t, nn.Parameter):
            seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(8, 16)).float().square().mean()
    expected = sum(t.numel() * t.element_size() for t in seen.values())
    for looks in ((2,), (2, 3)):
        assert sum(sum(row.saved.values()) for row in audited(Net(), looks=looks).rows) == expected


def test_what_micro_batches_save_is_added_up_where_they_get_the_same_memory():
    def call(times):
        def micro_batches(model, x):
            for _ in range(times - 1):
                model(torch.randn_like(x)).float().square().mean().backward()
            return model(x)

        return micro_batches

    reports = [audited(dtype=torch.float32, looks=(2,), call=call(times)) for times in (1, 8)]
    once, often = (sum(sum(row.saved.values()) for row in report.rows) for report in reports)
    assert often == 8 * once


def test_a_checkpoint_keeps_nothing_and_is_not_computed_for_the_table():
    runs = []

    def call(model, x):
        return checkpoint(lambda x: runs.append(None) or model.blocks[0](x), x, use_reentrant=False)

    report = audited(looks=(2,), call=call)
    assert len(runs) == 2 * 4, "in forward and in backward of each step"
    assert not rows_by_name(report)["fc"].saved
    plain = audited(looks=(2,), call=lambda model, x: model.blocks[0](x))
    assert rows_by_name(plain)["fc"].saved


def test_two_models_have_rows_of_their_own():
    generator = nn.Sequential(nn.Linear(16, 16))
    critic = type("Critic", (nn.Sequential,), {})(nn.Linear(16, 16)).bfloat16()
    parameters = [*generator.parameters(), *critic.parameters()]
    audit = trained(lambda: critic(generator(torch.randn(4, 16)).bfloat16()).sum(), parameters)
    rows = rows_by_name(audit.report())
    assert {*rows["0"].parameters} == {"float32"}
    assert {*rows["Critic.0"].parameters} == {"bfloat16"}


def test_masters_of_a_level_and_of_an_optimizer_are_shown():
    model = nn.Sequential(nn.Linear(16, 16))
    amp_graph.convert(model, "bf16-O2")
    audit = trained(lambda: model(torch.randn(4, 16)).sum(), model.parameters())
    (row,) = [row for row in audit.report().rows if row.parameters]
    assert ({*row.parameters}, {*row.masters}) == ({"bfloat16"}, {"float32"})
    amp_graph.revert(model)

    model = nn.Linear(16, 16).bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    with amp_graph.audit(model) as audit:
        optimizer.step()
    report = audit.report()
    assert report.outside_of_models == {"float32": 4 * (16 * 16 + 16)}
    assert "updated by optimizers, but of no model (masters?): fp32, 1.1 KiB" in report.text()


@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_what_a_function_trained_has_the_rows_of_a_model_that_is_still_there(keeps_optimizer):
    def train(model, optimizer):
        for _ in range(4):
            loss = model(torch.randn(8, 16).bfloat16()).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def made():
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).bfloat16()
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_and_return():
        model, optimizer = made()
        train(model, optimizer)
        return optimizer if keeps_optimizer else weakref.ref(optimizer)

    with amp_graph.audit() as there:
        kept = made()
        train(*kept)
    with amp_graph.audit() as gone:
        rest = train_and_return()
        gc.collect()
    assert not gone.training.models
    assert keeps_optimizer or rest() is None
    there, gone = there.report(), gone.report()
    fc = rows_by_name(gone)["0"]
    assert (fc.parameters, fc.gradients, fc.states) == ({"bfloat16": 544}, {"bfloat16": 544}, {"bfloat16": 1088})
    assert gone.rows == there.rows
    assert gone.outside_of_models == there.outside_of_models == {}


def test_compiled_modules_of_a_model_that_is_gone_are_named():
    def train(model):
        return trained(lambda: model(torch.randn(2, 16)).sum(), model.parameters())

    audit = train(nn.Sequential(torch.compile(nn.Linear(16, 4), backend="eager")))
    gc.collect()
    assert "the operations of compiled modules: 0 of Sequential" in audit.report().unseen


def test_the_report_is_honest_about_what_it_did_not_see():
    text = " ".join(audited(steps=9).text().split())
    assert "operations of 7 other steps" in text
    assert "other processes" in text
    assert re.search(r"cost: \S+ m?u?s for a step that was looked at, \S+ m?u?s for others \(\S+ times\)", text)
    compiled = audited(torch.compile(Net(), backend="eager"), steps=1, looks=())
    assert "compiled" not in " ".join(compiled.unseen)
    model = Net()
    model.blocks[1].compile(backend="eager")
    assert "the operations of compiled modules: blocks.1 of Net" in audited(model, steps=2, looks=(2,)).unseen


def test_the_page_fetches_nothing_and_escapes_everything(report, tmp_path):
    report.html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "<script" not in page
    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#)\w", page) == []
    assert "value <b>" not in page
    assert "value &lt;b&gt;&amp;amp;&lt;/b&gt;" in page
    assert page.count('id="AMP101"') == 1, "where the links of the findings lead"
    assert 'href="#AMP101"' in page
    for text in ("blocks.*.fc x3", "autocast(cpu, bfloat16)", "amp-graph run --policy bf16", "Not seen"):
        assert text in page
    with pytest.raises(AmpGraphError, match=r"cannot write .*\n  legal: .*\n  fix:   report.html"):
        report.html(tmp_path / "none" / "audit.html")


def faults_of(data):
    """Return what in ``data`` is not as the docs have it, or is missing."""
    present = dict(keys_of(data))
    return sorted([*faults_in(data), *(f"{path} is missing" for path in keys_of_the_docs() if path not in present)])


def full(report):
    """Return data that has something of everything."""
    data = replace(report, outside_of_models={"float32": 4}).to_dict()
    data["between_ranks"] = {"allreduce float32": {"calls": 1, "flops": 0, "bytes": 8}}
    data["modules"][0]["masters"] = {"float32": 4}
    return json.loads(json.dumps(data))


def test_the_data_is_as_the_docs_say(report):
    data = full(report)
    assert faults_of(data) == []
    assert {f["level"] for f in data["findings"]} <= {*LEVELS}
    assert data["findings"][0]["file"] == "train.py"
    assert json.loads(json.dumps(audited().to_dict()))["schema"] == 1


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda data: data["findings"][0].update(level=3), "findings[].level is 3"),
        (lambda data: data["findings"][0].update(column=3), "findings[].column is not documented"),
        (lambda data: data.pop("steps"), "steps is missing"),
        (lambda data: data["regions"][0].update(enabled=1), "regions[].enabled is 1"),
    ],
)
def test_control_other_data_is_refused(report, break_it, fault):
    data = full(report)
    break_it(data)
    assert faults_of(data) == [fault]


def test_rows_of_most_flops_are_first_and_the_text_says_where_the_others_are():
    model, sizes = nn.Sequential(), range(16, 66)
    for number, size in enumerate(sizes):
        model.add_module(f"{'ab'[number // 25]}{chr(97 + number % 25)}", nn.Linear(size, size + 1))
    report = audited(model, dtype=torch.float32)
    lines = report.text().splitlines()
    shown = [line.split()[0] for line in lines if re.match(r"  [ab][a-y] ", line)]
    assert shown[:3] == ["by", "bx", "bw"]
    (more,) = (line for line in lines if "more rows" in line)
    assert more.endswith("more rows: audit.report().html(path) has all")
    assert "more rows: --report FILE.html has all" in report.text(whole="--report FILE.html")
    assert f"{more.partition(':')[0]}\n" in report.text(whole="")
