"""A policy is its text is its dict, every field of it; and a slip of the pen is told what was meant."""

import dataclasses
import pickle

import pytest
import torch

from amp_graph import Policy
from amp_graph.errors import PolicyError
from amp_graph.passes.pipeline_options import PipelineOptions
from tests.passes.planning import machine

# A value of its own for every field: a round trip that loses a field cannot hide behind a default.
OTHER = {
    "dtype": "fp16",
    "level": "O2",
    "accuracy": "fast",
    "lists": ("autocast_cpu", "my.toml"),
    "allow": ("aten.mm", "aten.bmm"),
    "deny": ("aten.exp",),
    "fp32_inside": ("aten.softmax",),
    "follow": ("aten.gelu", "aten.tanh"),
    "neutral": ("aten.relu",),
    "opaque": ("aten.cdist",),
    "remove": ("aten.log",),
    "keep_fp32": "lm_head|.*norm",
    "keep_outputs": False,
    "device": "cuda",
    "skip": ("attention", "fuse_gelu"),
    "recompute": "all",
    "planner": "paint",
    "skip_unprofitable": "true",
    "replay": True,
    "widen": True,
    "calibration": "run.json",
    "keep_ops": ("layers.3.fc:linear", ":add.1"),
    "emulate": "cuda",
    "measured_on": "NVIDIA H200, of 141 GB",
}
FIELDS = [f.name for f in dataclasses.fields(Policy)]


def test_every_field_has_another_value_here():
    assert set(OTHER) == set(FIELDS)
    assert all(OTHER[f.name] != f.default for f in dataclasses.fields(Policy))


READ_FROM_FILES = {"lists", "calibration"}
OF_THE_GRAPH = {"device"}  # ``planned_for`` is what the policy says


@pytest.mark.parametrize(
    "name", sorted(set(OTHER).intersection(PipelineOptions.__annotations__) - READ_FROM_FILES - OF_THE_GRAPH)
)
def test_a_word_that_passes_read_is_handed_on_to_them(name):
    options = [getattr(policy.pipeline_options("cpu"), name) for policy in (Policy(), Policy(**{name: OTHER[name]}))]
    assert options[0] != options[1]


PATTERNS = ("a,b", "a=b", "x{1,2}", r"\w+,\d", "a|b", r"layers\.(0|1)\..*")
MORE = [{"keep_fp32": p} for p in PATTERNS] + [{"accuracy": n} for n in (1.5, 2, 0.1, 1 / 3, 1e-9, 12345.678)]


@pytest.mark.parametrize("fields", [OTHER, {}, *[{name: OTHER[name]} for name in OTHER], *MORE])
def test_round_trips(fields):
    policy = Policy(**fields)
    assert Policy.parse(str(policy)) == policy
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.parse(policy) is policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(Policy(**fields)) == hash(policy)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("bf16", {"dtype": "bf16"}),
        ("fp16-O1", {"dtype": "fp16", "level": "O1"}),
        ("O0", {"level": "O0"}),
        ("bfloat16", {"dtype": "bf16"}),
        ("float16", {"dtype": "fp16"}),
        ("half", {"dtype": "fp16"}),
        ("dtype=float16", {"dtype": "fp16"}),
        (" bf16 , accuracy = fast ", {"dtype": "bf16", "accuracy": "fast"}),
        (
            "bf16,keep_fp32=lm_head|.*norm,lists=my.toml",
            {"dtype": "bf16", "keep_fp32": "lm_head|.*norm", "lists": ("my.toml",)},
        ),
        (
            "fp16,lists=autocast_cpu|b.toml,keep_outputs=false",
            {"dtype": "fp16", "lists": ("autocast_cpu", "b.toml"), "keep_outputs": False},
        ),
        ("bf16,accuracy=1.5", {"dtype": "bf16", "accuracy": 1.5}),
        ("bf16,accuracy=2", {"dtype": "bf16", "accuracy": 2.0}),
        ("bf16,accuracy=1e-3,planner=mincut", {"dtype": "bf16", "accuracy": 0.001, "planner": "mincut"}),
        ("bf16,deny=aten.gelu|tanh", {"dtype": "bf16", "deny": ("aten.gelu", "tanh")}),
        ("", {}),
        (None, {}),
    ],
)  # fmt: skip
def test_text_forms(text, fields):
    assert Policy.parse(text) == Policy(**fields)


@pytest.mark.parametrize(
    ("text", "word", "meant"),
    [
        ("bf61", "bf61", "bf16"),
        ("fp61", "fp61", "fp16"),
        ("bf16,acuracy=fast", "acuracy", "accuracy"),
        ("bf16,accuracy=fats", "fats", "fast"),
        ("bf16,accuracy=autocats", "autocats", "autocast"),
        ("bf16,keep_fp23=x", "keep_fp23", "keep_fp32"),
        ("bf16,keep_output=false", "keep_output", "keep_outputs"),
        ("bf16,list=a.toml", "list", "lists"),
        ("bf16,keep_outputs=fals", "fals", "false"),
        ("bf16,device=cudaa", "cudaa", "cuda"),
        ("bf16,alow=aten.mm", "alow", "allow"),
    ],
)
def test_a_slip_is_told_what_was_meant(text, word, meant):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    message = str(caught.value)
    assert repr(word) in message
    assert f"did you mean {meant!r}?" in message
    assert "legal:" in message


NONSENSE = ("bf16,=", "bf16,zzzzqqq", "O7", "bf16-O1-yes", "bf16,keep_outputs=maybe", "int8")
TWICE = ("bf16,fp16", "bf16,accuracy=fast,accuracy=autocast", "bf16,deny=gelu,deny=tanh")


@pytest.mark.parametrize(("text", "told"), [*((t, "legal:") for t in NONSENSE), *((t, "twice") for t in TWICE)])
def test_nonsense_is_refused_with_what_is_legal(text, told):
    with pytest.raises(PolicyError, match=told):
        Policy.parse(text)


@pytest.mark.parametrize("given", [5, True, b"run.json", "run\0.json"])
def test_a_calibration_that_is_no_path_is_refused(given):
    for make in (lambda: Policy(calibration=given), lambda: Policy.from_dict({"calibration": given})):
        with pytest.raises(PolicyError, match=r"is no path\n  legal: (.*)\n  fix: "):
            make()


@pytest.mark.parametrize("given", [torch.bfloat16, 16, b"bf16", ["bf16"]])
def test_other_types_are_refused(given):
    with pytest.raises(PolicyError, match="legal: a Policy or its text form"):
        Policy.parse(given)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bf16,planner=paint,skip_unprofitable=true", "which predicts no times"),
        ("bf16,lists=autocast_cpu,skip_unprofitable=true", "reproduce torch.autocast"),
        ("bf16,accuracy=1.5,lists=autocast_cpu", "lists that reproduce"),
    ],
)
def test_products_are_left_alone_and_budgets_kept_only_where_costs_are_counted(text, why):
    with pytest.raises(PolicyError, match=why) as error:
        Policy.parse(text).op_list("cpu")
    assert Policy.parse(str(error.value).rpartition("Policy.parse(")[2].strip("')")).op_list("cpu")


# -- error budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1, 0.0, float("nan"), float("inf"), True, None, [1.5], "0", "-2", "nan", "inf"])
def test_what_is_no_error_budget_is_refused(given):
    with pytest.raises(PolicyError, match="is not an error budget") as error:
        Policy(accuracy=given)
    assert Policy.parse(str(error.value).rpartition("policy='")[2].strip("'")).budget == 1.5


def test_painting_cannot_keep_an_error_budget():
    with pytest.raises(PolicyError, match="this planner has no error budget") as error:
        Policy.parse("bf16,accuracy=1.5,planner=paint")
    assert "Policy(accuracy=1.5)" in str(error.value)


WRONG = {
    "no dict": "bf16",
    "a list": [("dtype", "bf16")],
    "a key that is no word": {3: "bf16"},
    "dtype": {"dtype": ["bf16"]},
    "level": {"level": None},
    "accuracy": {"accuracy": 10**400},
    "accuracy of another sort": {"accuracy": b"fast"},
    "lists": {"lists": "mine.toml"},
    "deny": {"deny": 3},
    "names": {"allow": ["gelu", 3]},
    "skip": {"skip": None},
    "keep_fp32": {"keep_fp32": ["norm"]},
    "keep_outputs": {"keep_outputs": "false"},
    "an array": {"planner": torch.ones(2)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_dict_of_other_types_is_refused_by_name(name):
    with pytest.raises(PolicyError, match=r"(?s)policy: .*legal: .*fix: "):
        Policy.from_dict(WRONG[name])


def test_lists_and_tuples_are_alike_and_a_policy_can_be_looked_up():
    made = Policy(deny=["gelu"], skip=["fuse-gelu"])
    assert made == Policy(deny=("gelu",), skip=("fuse_gelu",))
    assert len({made, Policy.from_dict(made.to_dict())}) == 1


@pytest.mark.parametrize("text", ["x" * 100_000, "bf16,keep_fp32=" + "(" * 5000, "accuracy=" + "9" * 5000, "bf16\0"])
def test_a_text_without_end_is_refused_in_a_few_words(text):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("text", ["opaque=gelu|\\,follow=exp", "lists=a\\ ,deny=gelu", "keep_fp32=a\\,b"])
def test_a_backslash_hides_no_comma(text):
    made = Policy.parse(text.replace("\\,follow", "\\ ,follow"))
    assert Policy.parse(str(made)) == made


IN_FORCE = {
    "": {},
    "bf16": {
        "recompute": "some",
        "replays": False,
        "planner": "mincut",
        "leaves": "false",
    },
    "bf16,replay=true": {"replays": True},
    "bf16,level=O0,replay=true": {"replays": False},
    "auto": {"leaves": "graphs"},
    "auto,skip_unprofitable=false": {"leaves": "false"},
    "bf16,accuracy=0.01": {"budget": 0.01},
    "bf16,accuracy=autocast": {"budget": None},
}


@pytest.mark.parametrize("text", IN_FORCE)
def test_what_is_in_force_is_what_is_asked_or_its_default(text):
    policy = Policy.parse(text)
    assert {name: getattr(policy, name) for name in IN_FORCE[text]} == IN_FORCE[text]


UNDER_AUTOCAST = {
    "bf16": True,
    "bf16-O0": False,
    "bf16,deny=gelu": False,
    "bf16,keep_fp32=head": False,
    "auto": False,
    "auto,skip_unprofitable=false": True,
}


@pytest.mark.by_profit
@pytest.mark.parametrize("text", UNDER_AUTOCAST)
def test_how_uncaptured_code_runs_on_a_cpu_without_low_arithmetic(text, monkeypatch):
    monkeypatch.setattr("amp_graph.policy.machine_for", lambda device: machine("cpu"))
    assert Policy.parse(text).runs_under_autocast("cpu") is UNDER_AUTOCAST[text]
