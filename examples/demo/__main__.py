"""Runs the demo: ``python -m examples.demo --quick``."""

import sys

from examples.demo.run import main

sys.exit(main(sys.argv[1:]))
