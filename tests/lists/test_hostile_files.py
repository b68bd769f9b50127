"""Files that nobody meant as a list or as a machine: each gets the error that is promised, with its place."""

import os

import pytest

from amp_graph.lists import ListError, effective
from amp_graph.passes.precision.machine_rates import (
    MACHINES,
    VARIABLE,
    Machine,
    machine_for,
    machine_text,
    own_file,
    read_machine,
)

RULE = b'[[op]]\nop = "gelu"\nclass = "deny"\nwhy = "so"\n'
FILES = {
    "no UTF-8": (RULE + b"# \xff\n", r":5: not UTF-8"),
    "UTF-16": (RULE.decode().encode("utf-16"), "not UTF-8"),
    "NUL": (RULE + b"\0", "not TOML"),
    "nested deeply": (RULE + b"when = " + b"[" * 5000, "nested too deeply|not TOML"),
    "tables nested deeply": (RULE + b"when = " + b"{a=" * 5000, "nested too deeply|not TOML"),
    "thousands of digits": (RULE + b"when = { dim = " + b"9" * 5000 + b" }", "not TOML|argument"),
    "a key of thousands of parts": (b"a." * 3000 + b"a = 1\n", "a key of more than 200 parts"),
    "a date": (RULE + b"when = { approximate = 1979-05-27 }\n", "unknown condition"),
    "no date": (RULE + b"when = 1979-99-99\n", "not TOML"),
    "a version of thousands of digits": (RULE + b'since = "' + b"9" * 5000 + b'.0"\n', "since = "),
    "a regular expression as an operator": (RULE.replace(b"gelu", b"(a+)+$.x"), "unknown operator"),
    "a name without end": (RULE.replace(b"gelu", b"x" * 100_000), "unknown operator"),
    "a bad pattern": (b"[[module]]\npath = '(a'\nprecision = 'full'\nwhy = 'so'\n", "bad regex"),
    "more than memory": (b"#" * (1 << 23), "more than"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_list(name, tmp_path):
    content, match = FILES[name]
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ListError, match=match) as caught:
        effective([str(tmp_path / "mine.toml")], dtype="bfloat16", device="cpu")
    assert "mine.toml" in str(caught.value)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    "name", ["a\0b.toml", "x" * 5000 + ".toml", "~no-such-user/x.toml", "/dev/zero", "", "../bf16_cpu"]
)
def test_a_list_that_is_no_file(name):
    with pytest.raises(ListError, match=r"(?s)no list .*legal:.*fix:"):
        effective([name], dtype="bfloat16", device="cpu")


def test_links_in_a_circle_and_files_that_may_not_be_read(tmp_path):
    link = tmp_path / "mine.toml"
    link.symlink_to(link)
    with pytest.raises(ListError, match="no list"):
        effective([str(link)], dtype="bfloat16", device="cpu")
    if os.geteuid():
        link.unlink()
        link.touch(0o000)
        with pytest.raises(ListError, match="cannot be read"):
            effective([str(link)], dtype="bfloat16", device="cpu")


CPU = (MACHINES / "cpu.toml").read_text()
NUMBERS = ("1e308", "5e-324", "1e400", "inf", "nan", "-1.0", "0", "true", str(10**400), "9" * 5000, '"1"', "[1]")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["call", "kept", "float32"])
def test_a_machine_of_numbers_that_are_none(key, number):
    line = next(line for line in CPU.splitlines() if line.startswith(f"{key} ="))
    with pytest.raises(ListError, match=r"mine\.toml"):
        read_machine(CPU.replace(line, f"{key} = {number}"), "mine.toml")


@pytest.mark.parametrize(
    "change", ["device = 3", 'device = "tpu"', "name = []", "promotes_by_copy = 1", "description = {}"]
)
def test_a_machine_of_other_types(change):
    key = change.split()[0]
    line = next(line for line in CPU.splitlines() if line.startswith(f"{key} ="))
    with pytest.raises(ListError, match=key):
        read_machine(CPU.replace(line, change), "mine.toml")


def test_a_machine_file_of_bytes(tmp_path, monkeypatch):
    file = tmp_path / "machine.toml"
    monkeypatch.setenv(VARIABLE, str(file))
    for content in (b"\xff", b"", b"[" * 5000, CPU.encode("utf-16")):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(content) * 1_000_000_000))
        with pytest.raises(ListError, match=r"machine\.toml"):
            machine_for("cpu")
    monkeypatch.setenv(VARIABLE, "/" + "x" * 5000)
    with pytest.raises(ListError, match="names no file"):
        machine_for("cpu")


def test_a_user_without_a_home_has_no_machine_of_their_own(monkeypatch):
    from pathlib import Path

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert own_file() is None
    assert isinstance(machine_for("cpu"), Machine)


def test_a_description_with_quotes_is_read_back():
    found = read_machine(CPU, "mine.toml")
    told = Machine(**{**vars(found), "description": 'a "quoted" \\ name\nof two lines', "name": '"'})
    again = read_machine(machine_text(told), "again.toml")
    assert (again.description, again.name) == (told.description, told.name)
