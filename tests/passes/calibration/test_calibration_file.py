"""What a calibration's file may hold: every part that is wrong is refused by name, and nothing that is right is."""

import copy
import json

import pytest
import torch

from amp_graph.errors import CalibrationError
from amp_graph.passes.calibration.calibration import Calibration, NodeRange, number
from amp_graph.passes.calibration.ranges import range_of

X = torch.tensor([1.0, 0.0, 7e4])
ONE = NodeRange(range_of([X]), range_of([X]).peak, range_of([X]), range_of([X]).peak, depth=3, free=False)
FOUND = Calibration({"a:mul": ONE}, "Net", "fp16", 1, True)


def read(tmp_path, data):
    (tmp_path / "run.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return Calibration.load(tmp_path / "run.json")


def put(data, path, value):
    """Return a copy with another value at ``path``; without the last key if there is no value."""
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


NODE = ("values", "a:mul")
WRONG = {
    "no schema": (("schema",), None, "no calibration: schema None"),
    "a version that is no integer": (("version",), True, "version True of the file"),
    "no batches": (("batches",), None, "an object with schema, version"),
    "a key too many": (("more",), 1, "the file: "),
    "operations that are a list": (("values",), [], "values: []"),
    "a model that is a number": (("model",), 3, "model: 3"),
    "batches below 0": (("batches",), -1, "batches: -1"),
    "batches that are true": (("batches",), True, "batches: True"),
    "gradients that are 1": (("gradients",), 1, "gradients: 1"),
    "no depth": ((*NODE, "depth"), None, "a:mul"),
    "a depth of a half": ((*NODE, "depth"), 0.5, "depth of 'a:mul'"),
    "free that is a text": ((*NODE, "free"), "yes", "free of 'a:mul'"),
    "a max that is infinite": ((*NODE, "reads", "max"), 1e39, "max in the reads of 'a:mul'"),
    "a max below 0": ((*NODE, "gives", "max"), -1.0, "max in the gives of 'a:mul'"),
    "a count too large": ((*NODE, "value", "masked"), 1 << 62, "masked in the value of 'a:mul'"),
    "more over than batches": ((*NODE, "reads", "over", "float16"), 2, "over.float16 in the reads of 'a:mul'"),
    "none over, yet max is": ((*NODE, "reads", "over", "float16"), 0, "over.float16 in the reads of 'a:mul'"),
    "over, yet max is not": ((*NODE, "reads", "over", "bfloat16"), 1, "over.bfloat16 in the reads of 'a:mul'"),
    "over without a dtype": ((*NODE, "gives", "over", "float16"), None, "over in the gives of 'a:mul'"),
    "elements that do not add up": ((*NODE, "gradient", "elements"), 4, "elements in the gradient of 'a:mul'"),
    "an exponent too high": ((*NODE, "value", "exponents", "128"), 0, "exponents in the value of 'a:mul': '128'"),
    "an exponent too low": ((*NODE, "value", "exponents", "-127"), 0, "exponents in the value of 'a:mul': '-127'"),
    "exponents in a list": ((*NODE, "value", "exponents"), [], "exponents in the value of 'a:mul': []"),
    "a mask that is infinite": ((*NODE, "reads", "mask"), 1e39, "mask in the reads of 'a:mul'"),
    "a least that is a text": ((*NODE, "value", "least"), "0", "least in the value of 'a:mul'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name, tmp_path):
    path, value, told = WRONG[name]
    with pytest.raises(CalibrationError) as error:
        read(tmp_path, put(FOUND.to_dict(), path, value))
    assert told in str(error.value)
    assert str(tmp_path / "run.json") in str(error.value)
    assert "\n  legal: " in str(error.value)


@pytest.mark.parametrize("text", ["", "[1", "NaN", '{"schema": Infinity}', "[" * 100_000, "1" * 5000])
def test_what_is_no_json_is_refused(text, tmp_path):
    with pytest.raises(CalibrationError, match=r"(not JSON|nested too deeply|no calibration)"):
        read(tmp_path, text)


def test_what_is_right_is_read_as_it_was_written(tmp_path):
    data = FOUND.to_dict()
    assert read(tmp_path, data) == FOUND
    for exponent in ("127", "-126"):
        assert read(tmp_path, put(data, (*NODE, "value", "exponents", exponent), 0)).values["a:mul"].depth == 3
    least = put(put(data, (*NODE, "reads"), None), (*NODE, "gives"), None)
    one = read(tmp_path, put(least, (*NODE, "gradient"), None)).values["a:mul"]
    assert (one.reads, one.gradient, one.gives) == (None, None, None)
    assert (one.depth, one.free) == (3, False)
    assert read(tmp_path, put(data, ("batches",), 0)).batches == 0
    assert read(tmp_path, put(data, (*NODE, "reads", "mask"), 1e38)).values["a:mul"].reads.mask == 1e38


def test_operations_merge_part_by_part():
    low, high = range_of([torch.ones(2)]), range_of([torch.full((3,), 8.0)])
    a, b = NodeRange(low, None, low, None, 4, False), NodeRange(high, high.peak, None, high.peak, 2, True)
    for one, other in [(a, b), (b, a)]:
        both = one + other
        assert both.value == low + high
        assert (both.reads, both.gradient, both.gives, both.depth, both.free) == (high.peak, low, high.peak, 4, True)
    found = Calibration({"x": a, "y": a}, "Net", "", 1, False, "1.json").merge(
        Calibration({"y": b}, "Net", "", 2, True)
    )
    assert found == Calibration({"x": a, "y": a + b}, "Net", "", 3, True)
    assert found.where == ""
    assert found.merge(Calibration({})).values == found.values, "one without operations differs from none"


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (65504.0, "65504"), (99999.0, "99999"), (1e5, "1e5"),
                                             (1.2345e5, "1.2e5"), (0.031, "0.031"), (3.2e-7, "3.2e-7")])  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text
