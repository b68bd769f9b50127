"""``amp-graph audit``: what precision a training really uses, and what is wrong with it. It converts nothing.

``session`` runs beside a training: ``events`` tells it of the calls of torch's functions for mixed precision, in every
step, and ``operations`` of all operations of the steps that are looked at. ``watchers`` hold what they were told and
find faults in it, a subject a file; ``codes.toml`` says what each fault is. ``audit_report`` is the result, a value
with three views.
Nothing here may change a bit of the training: a watcher reads, and an error of its own ends that watcher alone.
Imports ``numerics``, ``report`` and ``run``, and everything below; ``integrations`` and ``cli`` import from here.
"""
