"""What ran in which precision, and why: records of a rewritten graph, as text, HTML and DOT.

``collect_records`` reads the graphs, ``model_report`` is what ``amp_graph.report`` returns.
Imports ``capture`` and ``step``; ``cli`` imports from here.
"""

from amp_graph.report.model_report import Report as Report
from amp_graph.report.model_report import report as report
