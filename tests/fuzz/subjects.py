"""What is fuzzed: how an input is made, what is done with it, and which errors are promised."""

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from amp_graph.cli.input_spec import make_inputs, parse_inputs
from amp_graph.errors import AmpGraphError, CalibrationError, ListError, PolicyError
from amp_graph.lists import effective
from amp_graph.lists.load import FOLDER
from amp_graph.lists.path_pattern import matches
from amp_graph.lists.read_toml import read_text
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.pipeline_table import GROUPS, SKIPPABLE
from amp_graph.passes.precision.build_assignment import formulate
from amp_graph.passes.precision.machine_rates import MACHINES, machine_text, read_machine
from amp_graph.policy import Policy
from amp_graph.policy_words import ACCURACIES, DTYPES, LEVELS
from tests.fuzz.state_subjects import STATES
from tests.fuzz.texts import EVIL, ODD, encoded, mutated, word

PATHS = ("", "lm_head", "model.layers.11.self_attn.q_proj", "a" * 60, "encoder.layer.3.output.LayerNorm")
OPS = (
    "gelu",
    "aten.exp",
    "aten::linear",
    "torch.ops.aten.mm",
    "aten.pow.Tensor_Scalar",
    "aten.add_.Tensor",
    "no.such.op",
)
CLASSES = ("allow", "deny", "fp32_inside", "follow", "neutral", "opaque", "remove")


@dataclass(frozen=True)
class Subject:
    """``call(make(rng))`` succeeds, or raises one of ``promised``; both without a word more."""

    make: Callable[[random.Random], Any]
    call: Callable[[Any], object]
    promised: tuple[type[Exception], ...]
    prepare: Callable[[], object] = lambda: None  # what is made once, and is no input's time


# -- policies -----------------------------------------------------------------------------------------------


def policy(rng: random.Random) -> Any:
    if rng.random() < 0.25:
        return {_field(rng): _value(rng) for _ in range(rng.randrange(4))} if rng.random() < 0.97 else _value(rng)
    words = [word(rng, (*DTYPES, *LEVELS, "auto", "fp16-O1", "bf16-O2")) for _ in range(rng.randrange(3))]
    words += [f"{_field(rng)}={_text_value(rng)}" for _ in range(rng.randrange(4))]
    rng.shuffle(words)
    text = word(rng, (",", ", ", " ,")).join(words)
    return mutated(rng, text) if rng.random() < 0.3 else text


def _field(rng: random.Random) -> str:
    return word(rng, [f.name for f in fields(Policy)])


def _text_value(rng: random.Random) -> str:
    declared = (value for field in fields(Policy) for value in field.metadata["legal"])
    known = (*ACCURACIES, *declared, *SKIPPABLE, *GROUPS, *OPS)
    every = (*known, "true", "false", "1.5", "cpu", "default", "autocast_cpu", "bf16_cpu", "lm_head|.*norm", *EVIL)
    return "|".join(word(rng, every) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def _value(rng: random.Random, depth: int = 0) -> Any:
    plain = (
        None,
        True,
        0,
        -1,
        1.5,
        10**400,
        -(10**5000),
        float("nan"),
        float("inf"),
        1e308,
        b"bf16",
        ...,
        object,
        {1},
        1j,
    )
    if depth < 2 and rng.random() < 0.3:
        return rng.choice((list, tuple))(_value(rng, depth + 1) for _ in range(rng.randrange(3)))
    return rng.choice(plain) if rng.random() < 0.5 else _text_value(rng)


def use_policy(given: Any) -> None:
    found = Policy.parse(given) if isinstance(given, str) else Policy.from_dict(given)
    assert Policy.from_dict(found.to_dict()) == found
    if isinstance(given, str):
        assert Policy.parse(str(found)) == found, f"{given!r} is {found!r}, and then {Policy.parse(str(found))!r}"
    for path in PATHS:
        matches(found.keep_fp32, path)
    found.op_list("cpu")


# -- lists --------------------------------------------------------------------------------------------------


@lru_cache
def _list_tables() -> list[str]:
    """The tables of the built-in lists, as they are written."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.toml"))]
    return [
        "[[" + part for text in texts for part in text.split("\n[[")[1:]
    ]  # a file's last without the next's heading


def list_file(rng: random.Random) -> bytes:
    parts = [f"[list]\nname = {_toml(rng)}\nextends = {rng.choice(('[]', chr(34) + 'default' + chr(34), _toml(rng)))}"]
    for _ in range(rng.randrange(4)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(_list_tables()))
        elif kind < 0.7:
            keys = (
                "op",
                "class",
                "why",
                "source",
                "inputs",
                "promotes",
                "one_dtype",
                "when",
                "policy",
                "since",
                "until",
            )
            given = {"op": f'"{word(rng, OPS)}"', "class": f'"{word(rng, CLASSES)}"', "why": '"so"'}
            given |= {word(rng, keys): _toml(rng) for _ in range(rng.randrange(3))}
            parts.append("[[op]]\n" + "\n".join(f"{key} = {value}" for key, value in given.items()))
        elif kind < 0.9:
            path = rng.choice(EVIL).replace("'", "")
            parts.append(f'[[module]]\npath = \'{path}\'\nprecision = "{word(rng, ("full", "low"))}"\nwhy = "so"')
        else:
            parts.append(f'[remove]\nops = ["{word(rng, OPS)}"]')
    text = "\n".join(parts)
    return encoded(rng, mutated(rng, text) if rng.random() < 0.6 else text)


def _toml(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth < 3 and kind < 0.2:
        return "[" + ", ".join(_toml(rng, depth + 1) for _ in range(rng.randrange(3))) + "]"
    if depth < 3 and kind < 0.35:
        return "{ " + word(rng, ("kind", "exponent", "dim")) + " = " + _toml(rng, depth + 1) + " }"
    if kind < 0.6:
        return '"' + word(rng, ("mine", "default", "float", "integer", "2.12", "bf16_cpu", "input", *OPS)) + '"'
    return word(rng, ("true", "false", "1", "1.5", "-3", "1e308", "nan", "1979-05-27", "07:32:00", "''"))


def use_list(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        found = effective([file.name], dtype="bfloat16", device="cpu")
    for rule in found.modules:
        for path in PATHS:
            matches(rule.path, path)


# -- input specs --------------------------------------------------------------------------------------------


def spec(rng: random.Random) -> list[str]:
    return [_spec(rng) for _ in range(rng.choice((1, 1, 1, 2)))]


def _spec(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(("", "", word(rng, ("x=", "y = ", "input_ids=", "é="))))
        sizes = word(rng, (",", ", ", "")).join(word(rng, ("0", "1", "2", "8", "64")) for _ in range(rng.randrange(4)))
        ends = rng.choice(("", "", ":" + word(rng, ("0..9", "-3..3", "0..0", "5..1", f"0..{2**63}", f"{-(2**63)}..0"))))
        parts.append(name + word(rng, ("f32", "f64", "f16", "bf16", "i64", "i32", "bool")) + f"[{sizes}]" + ends)
    text = word(rng, (",", " , ")).join(parts)
    return mutated(rng, text) if rng.random() < 0.4 else text


def use_spec(texts: list[str]) -> None:
    counts = [_elements(sizes) for text in texts for _, _, sizes, _, _ in parse_inputs(text)]
    if all(count < 100_000 or count > 1 << 38 for count in counts):
        make_inputs(texts)


def _elements(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


# -- machine files ------------------------------------------------------------------------------------------


@lru_cache
def _machines() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(MACHINES.glob("*.toml"))]


@lru_cache
def _problem() -> Any:
    """A planning problem that every machine which is taken must be able to price."""
    import torch

    from tests.passes.graphs import capture_function
    from tests.passes.planning import problem_of

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    captured = capture_function(lambda s, x: torch.nn.functional.layer_norm((x @ s.w).relu() + x, (16,)), x, w=w)
    return problem_of(captured)


def machine_file(rng: random.Random) -> bytes:
    lines = rng.choice(_machines()).splitlines()
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        key, sign, _ = lines[at].partition("=")
        number = rng.choice((*ODD, "1e308", "1e29", "1e-29", "1", "5e-324", "-1e9", str(10**400), "true", '"1"', "[1]"))
        kind = rng.random()
        if sign and kind < 0.7:
            lines[at] = f"{key}= {number}"
        else:
            lines[at] = "" if kind < 0.8 else lines[at] * 2 if kind < 0.9 else rng.choice(lines)
    text = "\n".join(lines) + "\n"
    return encoded(rng, mutated(rng, text) if rng.random() < 0.3 else text)


def use_machine(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        found = read_machine(read_text(Path(file.name), "calibrate"), file.name)
    read_machine(machine_text(found), "again.toml")
    problem, dtype = _problem()
    formulate(problem, found, dtype)


# -- calibrations -------------------------------------------------------------------------------------------


@lru_cache
def _calibration() -> str:
    """A file as ``amp_graph.calibrate`` writes it."""
    import torch

    from amp_graph.passes.calibration.calibration_file import NodeRange
    from amp_graph.passes.calibration.ranges import range_of

    found = [range_of([torch.randn(64) * 10.0**e]) for e in (-6, 0, 6)]
    small, plain, large = (one for one in found if one is not None)
    values = {"fc:linear": NodeRange(plain, large.peak, small, plain.peak), ":mul.1": NodeRange(large + large)}
    return json.dumps(Calibration(values, "Model", "fp16-O1", 2, True).to_dict(), indent=1)


def calibration_file(rng: random.Random) -> bytes:
    data: Any = json.loads(_calibration())
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        _change(rng, data)
    text = json.dumps(data)
    if rng.random() < 0.3:
        text = text.replace(str(rng.randrange(10)), word(rng, (*ODD, "1e999", "-1", "NaN", "{}", "[" * 5000)), 1)
    return encoded(rng, mutated(rng, text) if rng.random() < 0.3 else text)


def _change(rng: random.Random, data: Any) -> None:
    """Change one place of a JSON value: set, drop, copy or rename."""
    while True:
        keys = list(data) if isinstance(data, dict) else [*range(len(data))]
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(data[key], (dict, list)) and rng.random() < 0.8:
            data = data[key]
            continue
        kind = rng.random()
        if kind < 0.6:
            odd = (None, True, 0, 1, -1, 2.5, 1e308, -(10**400), 1 << 62, "x", [], {}, {"max": 1}, 65504.0, 1e5)
            data[key] = rng.choice(odd)
        elif kind < 0.8:
            del data[key]
        elif isinstance(data, dict):
            data[word(rng, ("max", "over", "999", "-127", "\ud800", "", "values", "fc:linear"))] = data[key]
        return


def use_calibration(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        found = Calibration.load(file.name)
        found.merge(found).save(file.name)
        assert Calibration.load(file.name).batches == 2 * found.batches
    for dtype in ("float16", "bfloat16"):
        found.out_of_range(dtype)
        found.text(dtype)


SUBJECTS = {
    "policies": Subject(policy, use_policy, (PolicyError, ListError, CalibrationError)),
    "lists": Subject(list_file, use_list, (ListError,)),
    "input specs": Subject(spec, use_spec, (AmpGraphError,)),
    "calibrations": Subject(calibration_file, use_calibration, (CalibrationError,), _calibration),
    "machine files": Subject(machine_file, use_machine, (ListError,), _problem),
}
SUBJECTS |= {name: Subject(*given) for name, given in STATES.items()}
