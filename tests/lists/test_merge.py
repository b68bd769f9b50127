"""Precedence: built-in < file < argument; whole entries replace, conditional ones are asked first."""

import dataclasses

import pytest
import torch

from amp_graph.lists import ModuleRule, OpClass, dump, effective, load, merge

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
    turned = effective([second, first], **BF16_CPU)
    assert cls_of(turned, aten.gelu.default) == "deny"
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
    merge(base, deny=["gelu"], remove=["relu"], modules=[ModuleRule("a", "full")])
    assert base.rules == before
    assert base.modules == ()


def test_module_rules_of_later_lists_come_first(tmp_path):
    text = '[[module]]\npath = "lm_head|.*norm"\nprecision = "full"\nwhy = "sensitive"\n'
    op_list = effective([write(tmp_path, "mine.toml", text)], **BF16_CPU, modules=[ModuleRule("a.norm", "low")])
    assert op_list.module_rule("a.norm").precision == "low"
    assert op_list.module_rule("b.norm").precision == "full"
    assert op_list.module_rule("lm_head.x") is None


def test_every_class_can_be_asked_for(base):
    for cls in (c for c in OpClass if c is not OpClass.PROMOTE):
        assert cls_of(merge(base, **{cls.value: ["aten::gelu"]}), aten.gelu.default) == cls.value


def test_an_edited_file_is_read_again(tmp_path):
    path = write(tmp_path, "mine.toml", entry("aten.gelu", "deny"))
    load(path, **BF16_CPU)
    write(tmp_path, "mine.toml", entry("aten.gelu", "neutral"))
    assert cls_of(load(path, **BF16_CPU), aten.gelu.default) == "neutral"


def test_round_trip(tmp_path, base):
    odd = 'inputs = ["self"]\npromotes = true\nsource = "a \\"b\\""\npolicy = "p"\nsince = "2.11"\nuntil = "9.0"\n'
    odd += 'when = { approximate = ["tanh", "none"], self = { kind = "tensor" } }'
    mine = load(write(tmp_path, "odd.toml", entry("aten.gelu", "deny", odd)), **BF16_CPU)
    mine = merge(mine, modules=[ModuleRule(r".*\.norm", "full", "sensitive")])
    again = load(write(tmp_path, "again.toml", dump(mine)), **BF16_CPU)
    assert again.rules.keys() == mine.rules.keys()
    for key, rules in mine.rules.items():
        assert [_but_origin(rule) for rule in again.rules[key]] == [_but_origin(rule) for rule in rules]
    assert [_but_origin(m) for m in again.modules] == [_but_origin(m) for m in mine.modules]
    names = ("name", "dtype", "device", "unlisted", "description")
    assert [getattr(again, name) for name in names] == [getattr(mine, name) for name in names]


@pytest.mark.parametrize("told", ["", 'what the model "x" needs'])
def test_a_description_is_written_where_there_is_one(tmp_path, base, told):
    mine = dataclasses.replace(base, description=told)
    text = dump(mine)
    assert ("description = " in text) == bool(told)
    assert load(write(tmp_path, "again.toml", text), **BF16_CPU).description == told


def _but_origin(value):
    return {key: getattr(value, key) for key in value.__dataclass_fields__ if key != "origin"}
