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
    (tmp_path / "train.py").write_text(f"{script}torch.nn.Linear(2, 2)(torch.ones(2, 2))\n")
    status, out, errors = run(tmp_path, "--policy", "bf16", "--json", "--report", "r.html", "train.py")
    assert (status, out) == (0, "loss 0.87\n")
    told = json.loads(errors.splitlines()[-1])
    (model,) = told["converted"]
    assert (told["policy"], model["model"], model["parameters"], model["graphs"]) == ("bf16-O1", "Sequential", 19210, 1)
    assert model["called_at"] == "train.py:8"
    assert model["summary"]["casts"]["after"] == 6
    assert "report of Sequential" in told["files"][-1]
    (other,) = told["not_converted"]
    assert (other["model"], bool(other["why"])) == ("Linear", True)


def test_the_page_names_every_option():
    run_parser = next(a for a in parser()._actions if a.choices and "run" in a.choices).choices["run"]
    words = {word for action in run_parser._actions for word in action.option_strings if word.startswith("--")}
    assert {word for word in words if word not in PAGE} == {"--help"}
