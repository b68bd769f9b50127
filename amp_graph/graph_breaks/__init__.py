"""Runs the code that Dynamo does not capture: under ``torch.autocast`` or in fp32, as the policy says.

``escaped_code`` decides how it runs; ``run_under_autocast`` runs a call as partial graphs with Python between them.
Imports ``passes`` and ``policy``; ``capture``, ``numerics`` and ``step`` import from here.
"""
