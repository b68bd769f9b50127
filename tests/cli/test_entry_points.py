"""What pyproject.toml promises to install is there: the command, and the backend of torch.compile."""

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_entry_point_can_be_called():
    found = re.findall(r'^\S+ = "(amp_graph[\w.]*:\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(found) == 2
    assert all(callable(pkgutil.resolve_name(name)) for name in found)
