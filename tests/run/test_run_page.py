"""docs/run.md: its script and its first command print what the page shows; its table names the options there are."""

import re
from pathlib import Path

from amp_graph.cli.run_options import run_parser
from tests.run.test_scripts import run

PAGE = (Path(__file__).parents[2] / "docs" / "run.md").read_text()


def test_the_script_and_the_command_of_the_page_run(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```console\n\$ amp-graph run (.*?)\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    status, out, errors = run(tmp_path, *shown[0].split())
    assert status == 0
    told = re.sub(r"(?m)^ *note: torch \S+ is newer than .*\n", "", out + errors)  # of this machine's torch
    told = re.sub(r"(?m)^.*RuntimeWarning: Guards may run slower on Python 3\.13\.0.*\n.*\n", "", told)
    assert told == shown[1]


def test_the_page_names_every_option():
    words = {word for action in run_parser()._actions for word in action.option_strings if word.startswith("--")}
    assert {word for word in words if word not in PAGE} == {"--help"}
