"""Fuzz each subject and print what became of it; exit status 1 where anything is at fault."""

import argparse
import sys

from tests.fuzz.run import run
from tests.fuzz.subjects import SUBJECTS

parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
parser.add_argument("subjects", nargs="*", choices=[[], *SUBJECTS], help="default: all")
parser.add_argument("--count", type=int, default=20_000, help="inputs of each (default: 20,000)")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

failed = False
for name in options.subjects or SUBJECTS:
    outcome = run(SUBJECTS[name], options.count, options.seed)
    print(f"{name}: {outcome}", flush=True)
    for fault in outcome.faults[:20]:
        print(f"  {fault}")
    failed = failed or bool(outcome.faults)
sys.exit(failed)
