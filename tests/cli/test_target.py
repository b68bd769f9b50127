"""TARGET and --input: what they give, and what each refusal points at."""

import pytest
import torch
from torch import nn

from amp_graph.cli.input_spec import DTYPES, make_inputs, parse_inputs
from amp_graph.cli.target import load_target
from amp_graph.errors import AmpGraphError

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
    def forward(self, x, scale=1.0):
        return self.fc(x) * scale

class Maker:
    @staticmethod
    def build():
        return Net()

model = Net()
pair = (Net(), torch.zeros(3, 4))
number = 3

def with_tuple(): return Net(), (torch.zeros(1, 4), 2.0)
def with_dict(): return Net(), {"x": torch.zeros(1, 4), "scale": 2.0}
def needs(width): return Net()
def nothing(): return None
def three(): return Net(), 1, 2
def broken(): raise KeyError("width")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "some_models", raising=False)
    path = tmp_path / "some_models.py"
    path.write_text(SOURCE)
    return path


def refusal(call):
    with pytest.raises(AmpGraphError) as caught:
        call()
    return str(caught.value)


def test_every_kind_of_target_gives_a_module_and_inputs(file):
    for name in ("Net", "model", "Maker.build"):
        target = load_target(f"{file}:{name}", ["f32[3,4]"])
        assert isinstance(target.model, nn.Module)
        assert [tuple(a.shape) for a in target.args] == [(3, 4)]
    assert [tuple(a.shape) for a in load_target(f"{file}:pair").args] == [(3, 4)]
    assert load_target(f"{file}:with_tuple").args[1] == 2.0
    assert sorted(load_target(f"{file}:with_dict").kwargs) == ["scale", "x"]
    assert isinstance(load_target("some_models:model", ["x=f32[1,4]"]).model, nn.Module)


def test_inputs_given_on_the_command_line_replace_those_of_the_target(file):
    target = load_target(f"{file}:with_dict", ["x=f32[7,4]"])
    assert (target.args, list(target.kwargs)) == ((), ["x"])


# (target, the column that the caret points at or None for that of the name, what)
TARGETS = {
    "no colon": ("models", 6, "no ':' before a name"),
    "no name": ("models:", 7, "no name"),
    "no module": (":build", 6, "no name"),
    "no file": ("nowhere.py:build", 0, "no file nowhere.py"),
    "no package": ("nowhere.models:x", 0, "No module named 'nowhere'"),
    "relative": (".models:x", 0, "relative import"),
    "no attribute": ("FILE:with_tuplo", None, "has no attribute 'with_tuplo'; did you mean with_tuple"),
    "not callable": ("FILE:number", None, "number gives a int"),
    "gives nothing": ("FILE:nothing", None, "nothing gives a NoneType"),
    "gives three": ("FILE:three", None, "three gives a tuple"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_bad_target_is_pointed_at(file, case):
    text, column, what = TARGETS[case]
    text = text.replace("FILE", str(file))
    column = len(str(file)) + 1 if column is None else column
    first, shown, caret, said, example = refusal(lambda: load_target(text)).splitlines()
    assert first.startswith("TARGET: ")
    assert what in first
    assert shown == f"    {text}"
    assert caret == " " * (4 + column) + "^"
    assert said.startswith("  legal: ")
    assert example.startswith("  example: ")


def test_what_the_users_code_raises_passes_through(file, tmp_path):
    with pytest.raises(KeyError, match="width"):
        load_target(f"{file}:broken")
    (tmp_path / "imports.py").write_text("import not_there_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_target(f"{tmp_path / 'imports.py'}:x")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_target("imports:x")


def test_inputs_that_do_not_fit_forward_are_refused_before_it_runs(file):
    said = refusal(lambda: load_target(f"{file}:Net"))
    assert "Net.forward(x, scale=1.0) cannot be called with (): missing a required argument: 'x'" in said
    assert "example: --input 'x=f32[8,16]'" in said
    said = refusal(lambda: load_target(f"{file}:Net", ["y=f32[1],z=f32[1]"]))
    assert "with (y, z): missing a required argument: 'x'" in said


def test_a_single_input_is_passed_by_position_whatever_its_name(file):
    for spec in ("y=f32[2]", "f32[2]"):
        target = load_target(f"{file}:Net", [spec])
        assert ([list(one.shape) for one in target.args], target.kwargs) == ([[2]], {})
    for spec in ("x=f32[2]", "x=f32[2],scale=f32[]"):  # names that fit stay names
        assert not load_target(f"{file}:Net", [spec]).args


def test_inputs_are_parsed_by_name_dtype_sizes_and_range():
    assert parse_inputs(" x = f32[8, 3] , i64[]:-2..2,ok=bool[4]") == [
        ("x", "f32", (8, 3), 0, 9),
        ("", "i64", (), -2, 2),
        ("ok", "bool", (4,), 0, 1),
    ]


@pytest.mark.parametrize(("word", "dtype"), DTYPES.items())
def test_made_inputs_have_their_dtype_and_are_seeded(word, dtype):
    (made,), _ = make_inputs([f"{word}[5,0,2]"])
    assert (made.dtype, tuple(made.shape)) == (dtype, (5, 0, 2))
    (first,), (second,) = (make_inputs([f"{word}[64]"])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_ranges_are_inclusive_and_ten_digits_by_default():
    args, kwargs = make_inputs(["i64[4000]", "y=i32[4000]:-1..1"])
    assert sorted(set(args[0].tolist())) == list(range(10))
    assert sorted(set(kwargs["y"].tolist())) == [-1, 0, 1]


# (spec, the column of the input that the caret points at)
SPECS = {
    **dict.fromkeys(("x=f31[8]", "x=[8]", "", "x=f32", "x=f32[8,16", "f32[8,n]", "f32[-1]", "f32[1.5]", "i64[8]:",
                     "f32[8] i64[8]", "f32[8]:0..1", "i64[8]:3", "i64[8]:9..0", "f32[8]x", "f32[8 3]", "f32[8,,3]",
                     "x=f32[1],"), 0),
    "f32[8],i64[8": 7, "f32[\0]": 0, "(" * 9000: 0, "\ud800=f32[]": 0,
    "x=f32[" + "9" * 5000 + "]": 0, "i64[2]:0.." + "9" * 5000: 0, "f32[8" + "," * 90_000 + "x": 0,
}  # fmt: skip


@pytest.mark.parametrize("text", SPECS, ids=lambda text: text[:12])
def test_a_bad_spec_is_pointed_at(text):
    first, shown, caret, said, example = refusal(lambda: parse_inputs(text)).splitlines()
    assert first.startswith("--input: ")
    assert (shown, caret) == (f"    {text[:2000]}", " " * (4 + SPECS[text]) + "^")
    assert said.startswith("  legal: NAME=DTYPE[SIZES]")
    assert example == '  example: --input "x=f32[8,3,224,224],y=i64[8]:0..999"'


@pytest.mark.parametrize("text", [
    "x=f32[1],x=f32[2]", "f64[1099511627776]", "f32[" + ",".join(["99999999"] * 40) + "]", "i64[2]:0.." + "9" * 40,
])  # fmt: skip
def test_what_cannot_be_made_is_refused(text):
    assert refusal(lambda: make_inputs([text])).startswith("--input: ")
