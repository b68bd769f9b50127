"""``python -m amp_graph`` is ``amp-graph``."""

import sys

from amp_graph.cli.main import main

sys.exit(main())
