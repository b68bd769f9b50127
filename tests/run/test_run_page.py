"""docs/run.md: its script and its first command print what the page shows; its table names the options there are."""

import json
import re
from pathlib import Path

from amp_graph.cli.main import parser
from tests.run.test_scripts import run

PAGE = (Path(__file__).parents[2] / "docs" / "run.md").read_text()


def test_the_script_and_the_command_of_the_page_run(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```console\n\$ amp-graph run (.*?)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    status, out, errors = run(tmp_path, *shown[0].split())
    assert status == 0
    told = re.sub(r"(?m)^.*RuntimeWarning: Guards may run slower on Python 3\.13\.0.*\n.*\n", "", out + errors)
    assert told == shown[1]


def test_with_json_the_last_line_of_stderr_is_the_exit_report(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "frozen.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2, 2))\n")
    words = ("--policy", "bf16", "--json", "--report", "r.html")
    found = {}
    for name in ("train.py", "frozen.py"):
        status, out, errors = run(tmp_path, *words, name)
        assert (status, out) == (0, "loss 0.87\n" if name == "train.py" else "")
        found[name] = json.loads(errors.splitlines()[-1])
    told = found["train.py"]
    (model,) = told["converted"]
    assert (told["policy"], model["model"], model["parameters"], model["graphs"]) == ("bf16-O1", "Sequential", 19210, 1)
    assert model["called_at"] == "train.py:8"
    assert model["summary"]["casts"]["after"] == 6
    assert "report of Sequential" in told["files"][-1]
    assert found["frozen.py"]["converted"] == []
    assert found["frozen.py"]["not_converted"][0]["why"]


def test_the_page_names_every_option():
    run_parser = next(a for a in parser()._actions if a.choices and "run" in a.choices).choices["run"]
    words = {word for action in run_parser._actions for word in action.option_strings if word.startswith("--")}
    assert {word for word in words if word not in PAGE} == {"--help"}
