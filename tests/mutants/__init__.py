"""Mutation testing of the core with cosmic-ray's operators and sessions: ``python -m tests.mutants --help``.

``population.py`` lists the mutants of files and samples them; ``hook.py`` gives the import system the mutated source,
the file itself stays as it is; ``reasons.toml`` says why no test is written for a survivor.
"""
