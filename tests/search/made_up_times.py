"""Times that are made up: low precision is not fast in models that are small enough for a test."""

from amp_graph.capture.conversion import conversion_of
from amp_graph.search.bench import Bench


def low_takes(share, monkeypatch, *, noise=0.01, time_of=None, autocast=1.0):
    """Let each converted model take ``share`` of fp32's time, or what ``time_of`` returns for its policy."""

    def time(bench, model):
        if (found := conversion_of(model)) is None:
            return 1.0 if model is bench.plain else autocast
        return time_of(str(found.policy)) if time_of else share

    monkeypatch.setattr(Bench, "ratios", lambda bench, model, beside: [time(bench, model) / time(bench, beside)] * 7)
    monkeypatch.setattr(Bench, "noise", noise)
