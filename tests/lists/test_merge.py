"""Precedence: built-in < file < argument; whole entries replace, conditional ones are asked first."""

import pytest
import torch

from amp_graph.lists import OpClass, effective, load, merge

aten = torch.ops.aten
BF16_CPU = {"dtype": "bfloat16", "device": "cpu"}


@pytest.fixture
def base():
    return load("default", **BF16_CPU)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def entry(op, cls, extra=""):
    return f'[[op]]\nop = "{op}"\nclass = "{cls}"\nwhy = "test"\n{extra}\n'


def cls_of(op_list, op, **arguments):
    rule = op_list.lookup(op, arguments)
    return rule and rule.cls.value


def test_argument_beats_file_beats_builtin(tmp_path, base):
    path = write(tmp_path, "mine.toml", entry("aten.gelu", "deny"))
    assert cls_of(base, aten.gelu.default) == "follow"
    mine = load(path, **BF16_CPU)
    assert cls_of(mine, aten.gelu.default) == "deny"
    assert cls_of(mine, aten.silu.default) == "follow"
    asked = effective([path], **BF16_CPU, allow=["gelu"])
    assert cls_of(asked, aten.gelu.default) == "allow"
    assert asked.rules["aten.gelu"][0].origin == "argument allow="
    assert mine.rules["aten.gelu"][0].origin == f"{path}:2"


def test_later_files_win(tmp_path):
    first = write(tmp_path, "a.toml", entry("aten.gelu", "deny") + entry("aten.silu", "deny"))
    second = write(tmp_path, "b.toml", entry("aten.gelu", "allow"))
    both = effective([first, second], **BF16_CPU)
    assert (cls_of(both, aten.gelu.default), cls_of(both, aten.silu.default)) == ("allow", "deny")
    assert cls_of(effective([second, first], **BF16_CPU), aten.gelu.default) == "deny"
    assert effective([], **BF16_CPU).rules == load("default", **BF16_CPU).rules


def test_extends_is_beside_the_file_and_may_be_many(tmp_path):
    write(tmp_path, "a.toml", '[list]\nextends = []\nunlisted = "native"\n' + entry("aten.gelu", "deny"))
    path = write(tmp_path, "b.toml", '[list]\nextends = ["a.toml", "autocast_cpu"]\n' + entry("aten.silu", "allow"))
    op_list = load(path, **BF16_CPU)
    assert (cls_of(op_list, aten.gelu.default), cls_of(op_list, aten.silu.default)) == ("deny", "allow")
    assert cls_of(op_list, aten.linear.default) == "allow"
    assert (op_list.name, op_list.unlisted) == ("b", "native")
    assert cls_of(op_list, aten.relu.default) is None


def test_whole_packet_replaces_overloads_and_in_place(base):
    assert "aten.softmax.int" in base.rules
    merged = merge(base, deny=["aten.softmax"])
    assert "aten.softmax.int" not in merged.rules
    assert cls_of(merged, aten.softmax.int, dtype=None) == "deny"
    in_place = merge(merge(base, opaque=["aten.relu_"]), allow=["relu"])
    assert cls_of(in_place, aten.relu_.default) == "allow"


def test_overload_beside_packet_in_one_list(base):
    merged = merge(base, deny=["aten.gelu"], allow=["aten.gelu.default"])
    assert cls_of(merged, aten.gelu.default) == "allow"
    assert cls_of(merged, aten.gelu.out) == "deny"


def test_conditional_entry_is_asked_before_what_it_extends(tmp_path):
    path = write(tmp_path, "mine.toml", entry("aten.gelu", "deny", 'when = { approximate = "tanh" }'))
    op_list = load(path, **BF16_CPU)
    assert cls_of(op_list, aten.gelu.default, approximate="tanh") == "deny"
    assert cls_of(op_list, aten.gelu.default, approximate="none") == "follow"


def test_remove(tmp_path, base):
    path = write(tmp_path, "mine.toml", '[remove]\nops = ["aten.gelu", "softmax"]\n')
    op_list = load(path, **BF16_CPU)
    assert cls_of(op_list, aten.gelu.default) is None
    assert not [key for key in op_list.rules if key.startswith("aten.softmax")]
    assert cls_of(merge(base, remove=["gelu"], deny=["gelu"]), aten.gelu.default) == "deny"


def test_merge_leaves_its_base_alone(base):
    before = dict(base.rules)
    merge(base, deny=["gelu"], remove=["relu"])
    assert base.rules == before


def test_module_rules_of_later_lists_come_first(tmp_path):
    text = '[[module]]\npath = "{}"\nprecision = "{}"\nwhy = "sensitive"\n'
    first = write(tmp_path, "mine.toml", text.format("lm_head|.*norm", "full"))
    op_list = effective([first, write(tmp_path, "later.toml", text.format("a.norm", "low"))], **BF16_CPU)
    assert [(rule.path, rule.precision) for rule in op_list.modules] == [("a.norm", "low"), ("lm_head|.*norm", "full")]


def test_every_class_can_be_asked_for(base):
    for cls in (c for c in OpClass if c is not OpClass.PROMOTE):
        assert cls_of(merge(base, **{cls.value: ["aten::gelu"]}), aten.gelu.default) == cls.value


def test_an_edited_file_is_read_again(tmp_path):
    path = write(tmp_path, "mine.toml", entry("aten.gelu", "deny"))
    load(path, **BF16_CPU)
    write(tmp_path, "mine.toml", entry("aten.gelu", "neutral"))
    assert cls_of(load(path, **BF16_CPU), aten.gelu.default) == "neutral"
