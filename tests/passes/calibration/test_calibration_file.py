"""What a calibration's file may hold: every part that is wrong is refused by name, and nothing that is right is."""

import copy
import json

import pytest
import torch

from amp_graph.errors import CalibrationError
from amp_graph.passes.calibration.calibration import Calibration, number
from amp_graph.passes.calibration.calibration_file import NodeRange
from amp_graph.passes.calibration.ranges import range_of

X = torch.tensor([1.0, 0.0, 7e4])
ONE = NodeRange(range_of([X]), range_of([X]).peak, range_of([X]), range_of([X]).peak, free=False)
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
    "no batches": (("batches",), None, "the file: KeyError"),
    "operations that are a list": (("values",), [], "the file: AttributeError"),
    "a model that is a number": (("model",), 3, "the file: TypeError: '3 is no str'"),
    "batches below 0": (("batches",), -1, "the file: ValueError"),
    "batches that are true": (("batches",), True, "the file: ValueError"),
    "free that is a text": ((*NODE, "free"), "yes", "'a:mul': TypeError"),
    "no value": ((*NODE, "value"), None, "'a:mul': KeyError"),
    "a max that is infinite": ((*NODE, "reads", "max"), 1e39, "'a:mul': ValueError"),
    "a max below 0": ((*NODE, "gives", "max"), -1.0, "'a:mul': ValueError"),
    "a count too large": ((*NODE, "value", "masked"), 1 << 62, "'a:mul': ValueError"),
    "over without a dtype": ((*NODE, "gives", "over", "float16"), None, "'a:mul': KeyError"),
    "an exponent that is none": ((*NODE, "value", "exponents", "x"), 0, "'a:mul': ValueError"),
    "exponents in a list": ((*NODE, "value", "exponents"), [], "'a:mul': AttributeError"),
    "a least that is a text": ((*NODE, "value", "least"), "0", "'a:mul': ValueError"),
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
    with pytest.raises(CalibrationError, match=r"(not JSON|no calibration)"):
        read(tmp_path, text)


def test_what_is_right_is_read_as_it_was_written(tmp_path):
    data = FOUND.to_dict()
    assert read(tmp_path, data) == FOUND
    least = put(put(data, (*NODE, "reads"), None), (*NODE, "gives"), None)
    one = read(tmp_path, put(least, (*NODE, "gradient"), None)).values["a:mul"]
    assert (one.reads, one.gradient, one.gives, one.free) == (None, None, None, False)


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (65504.0, "65504"), (99999.0, "99999"), (1e5, "1e5"),
                                             (1.2345e5, "1.2e5"), (0.031, "0.031"), (3.2e-7, "3.2e-7")])  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text
