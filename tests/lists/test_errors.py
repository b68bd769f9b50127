"""Each refusal says what, where (file and line), what is legal, and the fix."""

import re

import pytest

from amp_graph.lists import ListError, effective, load, merge

HEAD = '[list]\nname = "mine"\n\n'


def refusal(tmp_path, text, **kwargs):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ListError) as caught:
        load(str(path), **{"dtype": "bfloat16", "device": "cpu", **kwargs})
    return str(caught.value).replace(f"{tmp_path}/", "")


def entry(op="aten.exp", cls="deny", why="overflows", extra=""):
    return f'[[op]]\nop = "{op}"\nclass = "{cls}"\nwhy = "{why}"\n{extra}\n\n'


# (text after the heading, where, what, what is legal)
CASES = {
    "unknown operator": (entry("aten.gelo"), 5, "unknown operator aten.gelo; did you mean aten.gelu", "registered in"),
    "unknown overload": (entry("aten.gelu.x"), 5, "aten.gelu.x has no such overload", "aten.gelu.default"),
    "unknown namespace": (entry("mylib.op"), 5, "unknown operator mylib.op", "import the library that registers"),
    "unknown class": (entry(cls="denny"), 6, "class = 'denny'; did you mean deny?", "allow, deny, fp32_inside, follow"),
    "no class": ('[[op]]\nop = "aten.exp"\nwhy = "x"\n', 4, "an [[op]] without `class`", "allow, deny"),
    "no op": ('[[op]]\nclass = "deny"\nwhy = "x"\n', 4, "an [[op]] without `op`", "a name"),
    "no why": ('[[op]]\nop = "aten.exp"\nclass = "deny"\n', 4, "an [[op]] without `why`", "one sentence"),
    "blank why": (entry(why=" "), 7, "why = ' '", "one sentence"),
    "unknown key": (entry(extra="wen = 1"), 8, "unknown key 'wen' in an [[op]]; did you mean when", "op, class, why"),
    "unknown table": ("[lists]\nx = 1\n", 4, "unknown key 'lists' in the file; did you mean list", "list, op, remove"),
    "duplicate": (entry() + entry(cls="allow"), 11, "two entries: deny at mine.toml:5, and allow here", "one entry"),
    "bad inputs": (entry(extra='inputs = ["x"]'), 5, "aten.exp has no argument 'x', named in `inputs`", "self, out"),
    "bad when": (entry(extra="when = { x = 1 }"), 5, "aten.exp has no argument 'x', named in `when`", "self, out"),
    "bad kind": (entry(extra='when = { self = { kind = "int" } }'), 8, "unknown condition", "a value, a list"),
    "promotes": (entry(extra='promotes = "yes"'), 8, "promotes = 'yes'", "true, false"),
    "since": (entry(extra='since = "2"'), 8, "since = '2'", "MAJOR.MINOR"),
    "why is a number": ('[[op]]\nop = "aten.exp"\nclass = "deny"\nwhy = 3\n', 7, "why = 3", "one sentence"),
    "op is a number": ('[[op]]\nop = 3\nclass = "deny"\nwhy = "x"\n', 4, "op = 3", "a name, or a list of names"),
    "op is no array": ('[op]\nop = "aten.exp"\n', 4, "'op' is not an array of tables", "[[op]]"),
    "remove": ('[remove]\nops = ["aten.exq"]\n', 5, "nothing to remove: no entry for aten.exq", "an operator that"),
    "remove key": ('[remove]\nop = ["aten.exp"]\n', 5, "unknown key 'op' in [remove]", "ops"),
    "regex": ('[[module]]\npath = "("\nprecision = "full"\nwhy = "x"\n', 5, "bad regex '('", "regular expression"),
    "precision": ('[[module]]\npath = "a"\nprecision = "half"\nwhy = "x"\n', 6, "precision = 'half'", "full, low"),
    "module why": ('[[module]]\npath = "a"\nprecision = "low"\n', 4, "a [[module]] without `why`", "one sentence"),
    "not TOML": ("[[op]\n", 4, "not TOML", "TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusal_of_a_file(tmp_path, case):
    text, line, what, legal = CASES[case]
    message = refusal(tmp_path, HEAD + text)
    assert message.startswith(f"mine.toml:{line}: ")
    assert what in message.splitlines()[0]
    if legal:
        assert legal in message.splitlines()[1]
        assert message.splitlines()[1].startswith("  legal: ")
    assert "\n  fix:\n    " in message


@pytest.mark.parametrize(
    ("head", "line", "what", "legal"),
    [
        ('dtype = "bf16"', 2, "dtype = 'bf16'", "bfloat16, float16, any"),
        ('unlisted = "opaq"', 2, "unlisted = 'opaq'; did you mean opaque?", "opaque, native"),
        ('dvice = "cpu"', 2, "unknown key 'dvice' in [list]; did you mean device?", "name, dtype"),
        ("extends = 1", 2, "extends = 1", "a name, or a list of names"),
    ],
)
def test_refusal_of_a_heading(tmp_path, head, line, what, legal):
    message = refusal(tmp_path, f"[list]\n{head}\n")
    assert message.startswith(f"mine.toml:{line}: {what}")
    assert legal in message


def test_a_list_of_names_is_blamed_on_the_line_of_the_name(tmp_path):
    text = '[[op]]\nop = [\n  "aten.exp",\n  "aten.expp",\n]\nclass = "deny"\nwhy = "x"\n'
    assert refusal(tmp_path, text).startswith("mine.toml:4: unknown operator aten.expp")


def test_wrong_dtype_or_device(tmp_path):
    message = refusal(tmp_path, '[list]\nextends = []\ndtype = "float16"\n')
    assert "mine.toml: this list is for dtype 'float16', and 'bfloat16' was asked for" in message
    assert 'dtype = "bfloat16"' in message


def test_circle(tmp_path):
    assert "a circle: mine.toml extends mine.toml" in refusal(tmp_path, '[list]\nextends = "mine.toml"\n')


def test_unknown_list_and_arguments():
    with pytest.raises(ListError, match="no list 'autocast_cup'; did you mean autocast_cpu"):
        load("autocast_cup", dtype="bfloat16", device="cpu")
    with pytest.raises(ListError, match=r"dtype='bf16'[^$]*legal: bfloat16, float16"):
        load("default", dtype="bf16", device="cpu")
    with pytest.raises(ListError, match=r"device='mps'[^$]*legal: cpu, cuda"):
        load("default", dtype="float16", device="mps")
    with pytest.raises(ListError, match=re.escape('fix:\n    names=["default"]')):
        effective("default", dtype="float16", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"deny": ["gelo"]}, "argument deny=: unknown operator aten.gelo; did you mean aten.gelu"),
        ({"deny": "gelu"}, "argument deny=: deny='gelu' is a string"),
        ({"deny": ["gelu"], "allow": ["aten.gelu"]}, "aten.gelu is asked for twice: deny and allow"),
        ({"remove": ["aten.relu_"]}, "argument remove=: nothing to remove: no entry for aten.relu_"),
    ],
)
def test_refusal_of_arguments(arguments, what):
    with pytest.raises(ListError, match=re.escape(what)):
        merge(load("default", dtype="bfloat16", device="cpu"), **arguments)
