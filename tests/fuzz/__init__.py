"""Made-up policies, lists, input specs and machine files: each is taken, or refused by the error that is promised.

``python -m tests.fuzz --count 20000 --seed 0`` (``make fuzz``).
"""
