"""Loss scaling for users' own loops: ``GradScaler``, ``LossScale``, ``MixedPrecisionOptimizer``.

The operators are in ``passes/loss_scaling``.
Imports ``optim`` and ``passes``.
"""
