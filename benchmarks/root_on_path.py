"""Puts the root of the checkout on the path, for benchmarks that train the models of ``examples/demo``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
