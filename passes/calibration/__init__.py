"""Ranges of values that were measured on batches, and what the planner keeps full because of them.

A ``Calibration`` holds the range of every operation's value, and of its gradient, by a key that other captures of the
same model share; a JSON file stores it. Imports ``graph`` and rooms below it; ``precision`` imports it.
"""
