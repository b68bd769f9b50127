"""TARGET and --input: what they give, and what each refusal points at."""

import pytest
import torch
from torch import nn

from amp_graph.cli.input_spec import InputSpec, make_inputs, parse_inputs
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


# (name or whole target, the column that the caret points at or None, what, what is legal)
TARGETS = {
    "no colon": ("models", 6, "no ':' before a name", "package.module:name or path/file.py:name"),
    "no name": ("models:", 7, "nothing after ':'", "path/file.py:name"),
    "no module": (":build", 0, "nothing before ':'", "package.module:name"),
    "no file": ("nowhere.py:build", 0, "no file nowhere.py", "the path of a Python file"),
    "no package": ("nowhere.models:x", 0, "no module 'nowhere'", "below the current directory"),
    "relative": (".models:x", 0, "'.models' is relative", "package.module:name"),
    "no attribute": ("FILE:with_tuplo", "NAME", "has no 'with_tuplo'; did you mean with_tuple", "Net, Maker"),
    "not callable": ("FILE:number", "NAME", "number is a int", "a torch.nn.Module, or (module, inputs)"),
    "needs arguments": (
        "FILE:needs",
        "NAME",
        "missing a required argument: 'width'",
        "that needs no argument",
    ),
    "gives nothing": ("FILE:nothing", "NAME", "it returns a NoneType", "a torch.nn.Module"),
    "gives three": ("FILE:three", "NAME", "it returns a tuple of (Net, int, int)", "(module, inputs)"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_bad_target_is_pointed_at(file, case):
    text, column, what, legal = TARGETS[case]
    text = text.replace("FILE", str(file))
    column = len(str(file)) + 1 if column == "NAME" else column
    first, shown, caret, said, example = refusal(lambda: load_target(text)).splitlines()
    assert first.startswith("TARGET: ")
    assert what in first
    assert shown == f"    {text}"
    assert caret == " " * (4 + column) + "^"
    assert said.startswith("  legal: ")
    assert legal in said
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
        InputSpec("x", "f32", (8, 3)),
        InputSpec("", "i64", (), -2, 2),
        InputSpec("ok", "bool", (4,)),
    ]


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("f32", torch.float32),
        ("f64", torch.float64),
        ("f16", torch.float16),
        ("bf16", torch.bfloat16),
        ("i64", torch.int64),
        ("i32", torch.int32),
        ("bool", torch.bool),
    ],
)
def test_made_inputs_have_their_dtype_and_are_seeded(word, dtype):
    (made,), _ = make_inputs([f"{word}[5,0,2]"])
    assert (made.dtype, tuple(made.shape)) == (dtype, (5, 0, 2))
    (first,), (second,) = (make_inputs([f"{word}[64]"])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_ranges_are_inclusive_and_ten_digits_by_default():
    args, kwargs = make_inputs(["i64[4000]", "y=i32[4000]:-1..1"])
    assert sorted(set(args[0].tolist())) == list(range(10))
    assert sorted(set(kwargs["y"].tolist())) == [-1, 0, 1]


# (spec, the column that the caret points at, what, what is legal)
SPECS = {
    "unknown dtype": ("x=f31[8]", 2, "unknown dtype 'f31'", "f32, f64, f16, bf16, i64, i32, bool"),
    "no dtype": ("x=[8]", 2, "a dtype is missing", "f32, f64"),
    "empty": ("", 0, "a dtype is missing", "f32, f64"),
    "trailing comma": ("f32[8],", 7, "a dtype is missing", "f32, f64"),
    "no bracket": ("x=f32", 5, "the end where '[' belongs", "a number is f32[]"),
    "not closed": ("x=f32[8,16", 10, "the end where ',' belongs", "']' after them"),
    "not a size": ("f32[8,n]", 6, "a size is missing", "whole numbers"),
    "a negative size": ("f32[-1]", 4, "a size is missing", "whole numbers"),
    "a fraction": ("f32[1.5]", 4, "a size is missing", "whole numbers"),
    "no comma": ("f32[8] i64[8]", 7, "'i' where ',' belongs", "between two inputs"),
    "a range of floats": ("f32[8]:0..1", 6, "f32 takes no range", "after i64 or i32"),
    "no range": ("i64[8]:", 7, "a range is missing", "lo..hi, both inclusive"),
    "half a range": ("i64[8]:3", 7, "a range is missing", "lo..hi"),
    "an empty range": ("i64[8]:9..0", 7, "the range 9..0 is empty", "lo <= hi"),
    "too large": ("i32[8]:0..4000000000", 7, "does not fit", "-2147483648..2147483646"),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_bad_spec_is_pointed_at(case):
    text, column, what, legal = SPECS[case]
    first, shown, caret, said, example = refusal(lambda: parse_inputs(text)).splitlines()
    assert first.startswith("--input: ")
    assert what in first
    assert (shown, caret) == (f"    {text}", " " * (4 + column) + "^")
    assert said.startswith("  legal: ")
    assert legal in said
    assert example == '  example: --input "x=f32[8,3,224,224],y=i64[8]:0..999"'


def test_a_name_given_twice_is_refused():
    assert "'x' is given twice" in refusal(lambda: make_inputs(["x=f32[1]", "x=f32[2]"]))
