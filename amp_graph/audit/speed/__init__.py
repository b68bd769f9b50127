"""What precision costs in time: products that ran in full precision, casts, and what a plan of ours would take.

``predicted_time`` computes seconds of what was counted. ``missed_operations`` and ``cast_counts`` are watchers;
``plan`` has the lines about amp_graph: ``planned_call`` plans the models that ``model_sketch`` drew without memory.
Imports the records of the audit, and what that may import.
"""
