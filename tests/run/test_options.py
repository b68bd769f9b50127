"""Bad command lines of ``amp-graph run``: one error, exit status 2, and the script does not start."""

import pytest

from amp_graph.cli.command_run import words_of
from amp_graph.cli.main import main, parser
from amp_graph.errors import AmpGraphError
from amp_graph.run.options import VARIABLE, RunOptions

BAD = {
    "no such file": (["none.py"], "No such file"),
    "a directory": (["."], "Is a directory"),
    "no such module": (["-m", "no_such_package.train"], "cannot run module no_such_package.train: No module named"),
    "no such module on top": (["-m", "no_such_package"], "there is no such module"),
    "a package without main": (["-m", "xml"], "a package without a __main__ module"),
    "an unknown policy": (["--policy", "bf17", "started.py"], "bf17"),
    "fp16-O2": (["--policy", "fp16-O2", "started.py"], "legal: level O1"),
    "O2": (["--policy", "bf16-O2", "started.py"], "in fp32 before its first step\n  legal: level O1, which keeps"),
    "O3, with other words": (
        ["--policy", "bf16-O3,accuracy=fast", "started.py"],
        "  fix:   amp-graph run --policy 'bf16-O1,accuracy=fast' train.py; or, for O3, "
        "amp_graph.convert(model, 'bf16-O3,accuracy=fast') in the script, before it makes the optimizer",
    ),
    "a list that is not there": (["--policy", "bf16,lists=none.toml", "started.py"], "none.toml"),
    "no directory": (["--report", "none/report.html", "started.py"], "there is no directory"),
    "a directory as report": (["--report", ".", "started.py"], "it is a directory"),
    "an unknown compiler": (["--compile", "gcc", "started.py"], "there is no such compiler"),
    "an unknown option": (["--polcy", "bf16", "started.py"], "unrecognized arguments"),
    "nothing to run": (["--policy", "bf16"], "a SCRIPT or -m MODULE is needed"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_command_line_is_one_error_and_nothing_starts(name, tmp_path, monkeypatch, capsys):
    words, expected = BAD[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "started.py").write_text("open('started', 'w')\n")
    assert main(["run", *words]) == 2
    told = capsys.readouterr()
    assert expected in told.err
    assert told.out == ""
    assert not (tmp_path / "started").exists()
    if "usage:" not in told.err:
        assert told.err.startswith("run: ")
        assert "  legal: " in told.err
        assert "  fix:" in told.err


@pytest.mark.parametrize(("words", "ours", "rest"), [
    ("--policy bf16 --dry-run train.py --policy mine -m x -- y", {"policy": "bf16", "dry_run": True},
     "train.py --policy mine -m x -- y"),
    ("--compile=inductor -m package.train --only mine", {"compile": "inductor"}, "package.train --only mine"),
    ("--json -- -odd-name.py x", {"json": True}, "-odd-name.py x"),
    ("train.py --json", {"json": False}, "train.py --json"),
])  # fmt: skip
def test_the_words_of_the_script_are_its_own(words, ours, rest):
    args = parser().parse_args(["run", *words.split()])
    assert vars(args).items() >= ours.items()
    assert (args.module_words is None) == ("-m package" not in words)
    assert words_of(args) == rest.split()


def test_the_variable_is_the_policy_where_none_is_given(monkeypatch):
    monkeypatch.setenv(VARIABLE, "bf16,accuracy=fast")
    assert RunOptions.checked().policy.accuracy == "fast"
    assert RunOptions.checked("bf16").policy.accuracy == "autocast"
    monkeypatch.setenv(VARIABLE, "bf17")
    with pytest.raises(AmpGraphError, match=f"from {VARIABLE}"):
        RunOptions.checked()


def test_an_emulation_of_a_gpu_is_a_policy_as_any_other():
    assert RunOptions.checked("bf16,emulate=cuda").policy.emulate == "cuda"


def test_help_names_every_option(capsys):
    assert main(["run", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"--{word}" in told for word in ("policy", "compile", "dry-run", "report", "json"))
    assert VARIABLE in told
    assert main(["--help"]) == 0
    assert "amp-graphrun--help" in "".join(capsys.readouterr().out.split())  # lines end at hyphens, too
