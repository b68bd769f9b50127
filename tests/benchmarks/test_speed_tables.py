"""The file of results of the benchmark of speed loses nothing, and the tables of the pages are what it gives."""

import copy
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = {
    "processor": "P",
    "capability": "C",
    "avx512_bf16": True,
    "amx": False,
    "libc": "L",
    "torch": "2",
    "python": "3",
}
OPTIONS = {"threads": 1, "scale": 1.0, "rounds": 7, "device": "cpu", "dtype": "bf16", "cpu_time": False, "skip": ""}
OPTIONS |= dict.fromkeys(("raised_thresholds", "keep_memory", "no_grad", "cudnn_benchmark", "cuda_graphs"), False)


def row(ms, ratio, **other):
    against = {"ratio": ratio, "p25": ratio - 0.1, "p75": ratio + 0.1}
    made = {"ms": ms, "over_limit": ms / 2, "against_autocast": against, "against_same_mode": against}
    made |= {"first_call_s": 1.0, "passes_s": None, "casts": {"count": 3, "bytes": 2_000_000}, "saved": None}
    return made | {"peak_bytes": 4_000_000, "held_bytes": 8_000_000} | other


def entry(**ratios):
    variants = {"autocast": row(10.0, 1.0)} | {name: row(10.0 / r, r) for name, r in ratios.items()}
    return {"baseline": "autocast", "compiled_baseline": None, "limit": {"ms": 5.0}, "variants": variants}


def filled(path, **models):
    from result_file import opened, run_of, written

    held = opened(path, MACHINE)
    for model, made in models.items():
        written(path, held, run_of(held, OPTIONS), "training", model, made)
    return held


# -- the file ---------------------------------------------------------------------------------------------


def test_a_partial_run_leaves_the_other_models_and_options(tmp_path):
    from result_file import opened, run_of, written

    path = tmp_path / "speed.json"
    filled(path, gpt=entry(amp_graph=1.5), vit=entry(amp_graph=2.0))
    held = opened(path, MACHINE)
    written(path, held, run_of(held, OPTIONS), "training", "gpt", entry(amp_graph=1.75, TrainStep=3.0))
    written(path, held, run_of(held, OPTIONS), "inference", "gpt", entry(amp_graph=4.0))
    written(path, held, run_of(held, OPTIONS | {"threads": 2}), "training", "gpt", entry(amp_graph=5.0))

    first, second = json.loads(path.read_text())["runs"]
    assert (first["options"]["threads"], second["options"]["threads"]) == (1, 2)
    assert first["results"]["training"] == {"gpt": entry(amp_graph=1.75, TrainStep=3.0), "vit": entry(amp_graph=2.0)}
    assert first["results"]["inference"] == {"gpt": entry(amp_graph=4.0)}
    assert second["results"] == {"training": {"gpt": entry(amp_graph=5.0)}}


@pytest.mark.parametrize(("what", "other"), [("torch", "2.1"), ("processor", "Q"), ("amx", True)])
def test_results_of_another_machine_or_version_are_not_mixed_in(tmp_path, what, other):
    from result_file import opened

    path = tmp_path / "speed.json"
    filled(path, gpt=entry(amp_graph=1.5))
    with pytest.raises(SystemExit, match=rf"{what}: {MACHINE[what]} is not {other}.*\n  fix:   --output"):
        opened(path, MACHINE | {what: other})


def test_rows_that_a_run_would_not_measure_again_are_not_lost(tmp_path):
    from result_file import refuse_to_lose, run_of

    path = tmp_path / "speed.json"
    held = filled(path, gpt=entry(amp_graph=1.5, TrainStep=2.0))
    run = run_of(held, OPTIONS)
    with pytest.raises(SystemExit, match="rows of gpt, training, that this run leaves out: TrainStep;"):
        refuse_to_lose(path, run, "training", "gpt", ["autocast", "amp_graph"])
    refuse_to_lose(path, run, "training", "gpt", ["autocast", "amp_graph", "TrainStep", "fp32"])
    refuse_to_lose(path, run, "inference", "gpt", ["autocast"])
    refuse_to_lose(path, run_of(held, OPTIONS | {"rounds": 3}), "training", "gpt", ["autocast"])


def test_a_file_of_another_form_is_refused(tmp_path):
    from result_file import opened

    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"machine": MACHINE, "options": {}, "results": {}}))
    with pytest.raises(SystemExit, match="is of format 1, not 2"):
        opened(path, MACHINE)


# -- the tables -------------------------------------------------------------------------------------------


def test_what_a_table_says(tmp_path):
    from tables import markdown

    failing = entry(amp_graph=0.5)
    failing["variants"]["TrainStep"] = {"error": "RuntimeError: no kernel"}
    lines = markdown(filled(tmp_path / "s.json", gpt=entry(amp_graph=2.0, TrainStep=3.0), vit=failing)).splitlines()
    wanted = [
        "| model | autocast, ms | amp_graph | TrainStep |",
        "| gpt | 10.0 | 2.00 [1.90-2.10] | 3.00 [2.90-3.10] |",
        "| vit | 10.0 | 0.50 [0.40-0.60] | fails |",
        "| **geometric mean** | | **1.00** | **3.00** |",
        "| gpt | amp_graph | 5.0 | 2.5 | 3 | 2.0 |  |  | 4.0 | 8.0 | 1.0 |  |",
        "| vit | TrainStep | fails: RuntimeError: no kernel |  |  |  |  |  |  |  |  |  |",
    ]
    assert [line for line in wanted if line not in lines] == []


def test_what_is_compiled_is_told_against_both_and_what_is_not_against_the_compiled_rival(tmp_path):
    from tables import markdown

    made = entry(amp_graph=1.0, TrainStep=2.0)
    made["compiled_baseline"] = "autocast + Inductor"
    made["variants"]["TrainStep"]["against_compiled"] = {"ratio": 1.6, "p25": 1.5, "p75": 1.7}
    made["variants"]["autocast + Inductor"] = row(8.0, 1.25)
    made["variants"]["amp_graph + Inductor"] = row(5.0, 1.8, against_autocast={"ratio": 2.2, "p25": 2.1, "p75": 2.3})
    lines = markdown(filled(tmp_path / "s.json", gpt=made)).splitlines()
    against = "amp_graph + Inductor, against eager autocast | TrainStep, against autocast + Inductor |"
    assert f"| model | autocast, ms | amp_graph | TrainStep | amp_graph + Inductor | {against}" in lines
    ratios = "1.00 [0.90-1.10] | 2.00 [1.90-2.10] | 1.80 [1.70-1.90] | 2.20 [2.10-2.30] | 1.60 [1.50-1.70]"
    assert f"| gpt | 10.0 | {ratios} |" in lines


def test_processors_of_one_name_are_told_apart(tmp_path):
    from result_file import processor

    cpuinfo = tmp_path / "cpuinfo"
    core = "processor : 0\ncpu family : 25\nmodel : {}\nmodel name : Some CPU\n\n"
    cpuinfo.write_text(core.format(17) * 2)
    assert processor(cpuinfo) == "Some CPU (family 25, model 17)"
    cpuinfo.write_text(core.format(2))
    assert processor(cpuinfo) == "Some CPU (family 25, model 2)"
    assert processor(tmp_path / "none") == ""


def committed(name="speed.json"):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_the_pages_show_the_results_that_are_there():
    from page_tables import pages

    assert {path: path.read_text() for path in pages()} == pages()


@pytest.mark.parametrize("written", ["narrow", "wide", "verdict"])
def test_other_results_are_another_table(written):
    import page_tables
    from tables import comparable

    held, table = committed(), getattr(page_tables, written)
    run = held["runs"].index(comparable(held)[0])
    for mode, results in held["runs"][run]["results"].items():
        for model, made in results.items():
            for which in ("against_same_mode", "ms")[: 1 if written == "verdict" else 2]:
                changed = copy.deepcopy(held)
                rows = changed["runs"][run]["results"][mode][model]["variants"]
                if which == "ms":
                    rows[made["baseline"]]["ms"] += 1
                else:
                    rows["amp_graph"][which]["ratio"] += 0.2 if written == "verdict" else 0.02
                assert table(changed) != table(held), (mode, model, which)
    assert held["runs"][run]["results"]["training"]


def test_a_run_with_another_heap_on_one_side_is_shown_nowhere(tmp_path):
    from page_tables import narrow, wide
    from tables import markdown

    held = filled(tmp_path / "s.json", gpt=entry(amp_graph=9.0, TrainStep=9.0))
    other = copy.deepcopy(held["runs"][0])
    other["results"]["training"]["gpt"] = entry(amp_graph=2.0, TrainStep=3.0)
    held["runs"][0]["options"]["keep_memory"] = True
    other["options"] |= {"keep_memory": True, "raised_thresholds": True}
    held["runs"].append(other)
    for table in (narrow, wide, markdown):
        assert "9.00" not in table(held)
        assert "3.00" in table(held)
        assert "malloc thresholds raised on all sides" in table(held)
    assert (
        "Left out, as amp_graph alone kept freed memory in them (`keep_memory=true`, which no longer exists): 1 run"
        in markdown(held)
    )


def test_a_page_without_its_markers_is_refused():
    from page_tables import markers, with_block

    begin, end = markers("speed")
    assert with_block(f"a\n{begin}\nold\n{end}\nb", "speed", "new") == f"a\n{begin}\nnew\n{end}\nb"
    for text in ("", begin, f"{end}\n{begin}", f"{begin}{begin}{end}", f"{markers('h200')[0]}{end}"):
        with pytest.raises(SystemExit, match="once each"):
            with_block(text, "speed", "new")
