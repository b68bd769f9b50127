"""The record of published scripts: nothing runs twice, and the committed page is what the committed runs give."""

from pathlib import Path

from tests.run.third_party_record import Record, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "scripts.json"


def test_the_page_is_what_the_record_gives():
    assert RESULTS.with_suffix(".md").read_text() == table(Record(RESULTS))


def test_a_run_that_is_there_is_not_repeated(tmp_path):
    path, runs = tmp_path / "scripts.json", []
    for _ in range(2):
        record = Record(path)
        for seed, way in ((1, "fp32"), (1, "amp-graph fp16"), (2, "fp32")):
            record.ran(
                "mnist", seed, way,
                lambda: runs.append(0) or dict(status=0, losses=[2.0, 1 + len(runs) / 4], told="told", seconds=3.0),
            )  # fmt: skip
    assert len(runs) == 3
    page = path.with_suffix(".md").read_text()
    assert "| mnist | 1 | 2 | 1.2500 |  |  | 1.5000 |  |  | 0.0769 | 0.1333 |" in page
    assert "- mnist, amp-graph fp16: told" in page
