"""``python -m amp_graph`` is ``amp-graph``."""

import sys

from amp_graph.cli import main

sys.exit(main())
