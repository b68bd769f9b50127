"""Times that are made up: low precision is not fast in models that are small enough for a test."""

from amp_graph.capture.conversion import conversion_of
from amp_graph.search.bench import Bench


def low_takes(share, monkeypatch, *, noise=0.01, time_of=None, autocast=1.0, swing=0.0):
    """Let each converted model take ``share`` of fp32's time, or what ``time_of`` returns for its policy.

    ``swing``: the share by which single turns are off, where a policy is measured for the first time.
    """

    def time(bench, model):
        if (found := conversion_of(model)) is None:
            return 1.0 if model is bench.plain else autocast
        return time_of(str(found.policy)) if time_of else share

    def ratios(bench, model, beside, more=1):
        off = swing if more == 1 else 0.0
        return [time(bench, model) / time(bench, beside) * factor for factor in (1 - off, 1, 1 + off)]

    monkeypatch.setattr(Bench, "ratios", ratios)
    monkeypatch.setattr(Bench, "noise", noise)
