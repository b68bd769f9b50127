"""The user's line of a node: the innermost that is not of the function that is captured."""

from torch import fx

from amp_graph.passes.graph.node_info import source_line

TRACE = """  File "/home/me/net.py", line 12, in forward
    x = self.fc(x)
  File "/home/me/parts/block.py", line 7, in run
    return x * 2
"""
OURS = """  File "/x/capture_runners.py", line 75, in amp_graph_forward_0
    return forward(*args, **kwargs)
"""


def test_the_innermost_line_of_the_user_is_told():
    node = fx.Graph().placeholder("x")
    told = {}
    for name, trace in {
        "two": TRACE,
        "called by ours": OURS + TRACE,
        "ours is inside": TRACE + OURS,
        "without code": '  File "/home/me/net.py", line 12, in forward',
        "ours alone": OURS,
        "none": None,
    }.items():
        node.meta["stack_trace"] = trace
        told[name] = source_line(node)
    inner = "block.py:7, in run: return x * 2"
    assert {name: line.endswith(inner) for name, line in told.items()} == {
        "two": True, "called by ours": True, "ours is inside": True, "without code": False, "ours alone": False,
        "none": False,
    }  # fmt: skip
    assert told["without code"].endswith("net.py:12, in forward")
    assert (told["ours alone"], told["none"]) == ("", "")
