"""Mutation testing of the core with cosmic-ray's operators and sessions: ``python -m tests.mutants --help``.

``population.py`` lists the mutants of files and samples them; ``coverage_map.py`` records which test runs which line,
by marks that ``lines.py`` puts into modules; ``coverage_table.py`` tells which lines none runs;
``choose.py`` chooses tests for a mutant; ``child.py`` runs them in a fork of a process that has imported torch;
``hook.py`` gives the import system the mutated source; ``table.py`` writes the result with ``reasons.toml``.
"""
