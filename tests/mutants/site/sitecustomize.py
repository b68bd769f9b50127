"""Install the mutant in Python processes that tests start: the folder is on PYTHONPATH while a mutant is tested."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("_mutant_hook", Path(__file__).parents[1] / "hook.py")
_hook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_hook)
_hook.install()
