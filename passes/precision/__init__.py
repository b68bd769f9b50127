"""Which operation runs in which precision: classes of operators, planners, cost model, error budget.

``plan_precision`` is the pass: rule-based, minimum cut or error budget; it only marks nodes.
Imports ``calibration`` and what is below it; ``casts`` reads the marks.
"""
