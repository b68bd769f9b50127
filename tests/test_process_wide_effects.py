"""What amp_graph changes in the process is what docs/internals/process-wide-effects.md lists, and nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "internals" / "process-wide-effects.md"


@pytest.fixture(scope="module")
def told():
    """What each stage of a use of amp_graph changed, in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "tests.snapshot_of_process"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def listed(page):
    """The names in the page's list of what stays."""
    _, _, part = page.partition("## What stays")
    return {name for line in part.splitlines() if line.startswith("|") for name in re.findall(r"`([\w.]+)`", line)}


def test_only_what_the_page_lists_is_changed(told):
    stages = told["stages"]
    assert {name for changed in stages.values() for name in changed} <= listed(PAGE.read_text())
    assert stages["import"] == ["torch.ops.amp_graph"]
    assert stages["convert"] == stages["steps"] == []
    assert stages["TrainStep and GradScaler"] == ["torch._opaque_base._FakeScriptObject_cls"]
    tables = ["torch.optim.optimizer._global_optimizer_post_hooks", "torch.optim.optimizer._global_optimizer_pre_hooks"]
    assert stages["O2"] == tables


def test_control_what_torch_does_by_itself_is_seen(told):
    assert {"torch._dynamo.utils.counters", "torch._dynamo.convert_frame.FRAME_COUNTER"} <= set(told["torch"])
    assert not [name for name in told["torch"] if name.endswith((".call_function", ".run_node"))]


def test_all_that_the_page_lists_is_changed(told):
    assert listed(PAGE.read_text()) == set(told["stages"]["in all"])


def test_control_a_snapshot_sees_what_is_changed_by_hand(told):
    assert len(told["by hand"]) == 10
    assert {*told["by hand"]} <= {*told["seen"]}
    assert {*told["by hand"]} & listed(PAGE.read_text()) == {"torch.optim.optimizer._global_optimizer_pre_hooks"}
