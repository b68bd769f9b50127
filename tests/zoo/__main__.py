"""Measures the models of the zoo and writes the table.

    python -m tests.zoo [--only transformers/bert,timm/] [--again] [--output benchmarks/results/zoo.json]

A model that has its rows is not run again, unless by ``--again`` or, where a row is not ok, by ``--failed``. Exit
status 1 if a model that counts has a row that is not ok.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from tests.zoo.catalogue import models
from tests.zoo.limits import SECONDS, rows_of
from tests.zoo.model import ZooModel
from tests.zoo.results import WORDS, Results
from tests.zoo.table import failing, markdown
from tests.zoo.trial import trials
from tests.zoo.warm import import_for, warm_up

OUTPUT = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo.json"


def main(argv: list[str]) -> int:
    """Run what has no rows yet; print a line for each model, and write the table after each."""
    options = _parsed(argv)
    results = Results(options.output)
    prefixes = options.only.split(",") if options.only else [""]
    entries = models()
    names = [name for name in entries if name.startswith(tuple(prefixes))]
    warm_up()
    for number, name in enumerate(names, 1):
        failed = options.failed and failing(results.models.get(name, {}))
        if results.has(name) and not options.again and not failed:
            continue
        start = time.monotonic()
        found = results.put(name, _measured(entries[name], options.seconds))
        _write_table(options.output, results, len(entries))
        print(f"{number}/{len(names)} {name}: {_told(found)} ({time.monotonic() - start:.0f} s)", flush=True)
    _write_table(options.output, results, len(entries))
    bad = [name for name in names if failing(results.models.get(name, {}))]
    print(f"{len(names)} models, {len(bad)} with a row that is not ok: {', '.join(bad) or '-'}")
    return 1 if bad else 0


def _write_table(output: Path, results: Results, total: int) -> None:
    if results.models:
        output.with_suffix(".md").write_text(markdown(results.models, total))


def _measured(entry: ZooModel, seconds: int) -> list[dict]:
    if why := import_for(entry.package):
        return [{"unavailable": why}]
    return rows_of(partial(trials, entry, list(WORDS)), seconds)


def _told(found: dict) -> str:
    if why := found.get("unavailable") or found.get("uncounted"):
        return f"not counted: {why}"
    rows = [(word, found.get(word, {})) for word in WORDS]
    return "; ".join(f"{w} {row['ratio'] if row.get('ok') else row.get('cause', 'not run')}" for w, row in rows)


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, or their beginnings, separated by commas")
    parser.add_argument("--again", action="store_true", help="run models that have their rows")
    parser.add_argument("--failed", action="store_true", help="run models again of which a row is not ok")

    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of processor time for one model")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file of results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
