"""Runs the tests with other versions of Python and of torch: ``python -m tests.versions``."""
