"""Runs the demo: ``python -m amp_graph.demo --quick``."""

import sys

from amp_graph.demo.run import main

sys.exit(main(sys.argv[1:]))
