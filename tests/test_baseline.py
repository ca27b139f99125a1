"""The figures that no change may make worse: how they are chosen, and how two runs of them are compared."""

from __future__ import annotations

import json

import pytest

from benchmarks import baseline, compare, synthetic
from benchmarks.__main__ import main


def figure(name, value, **more):
    return {"name": name, "unit": "ms", "better": "lower", "limit": None, "tolerance": None, "note": "n"} | {
        "value": value,
        **more,
    }


def row(before, after, **more):
    """What is printed of a figure with these values, round by round."""
    rounds = [
        ({"f": figure("f", old, **more)}, {"f": figure("f", new, **more)})
        for old, new in zip(before, after, strict=True)
    ]
    ((name, *cells),) = compare.rows(rounds)
    assert name == "f"
    return cells


def test_the_median_of_the_ratios_is_told_with_the_least_and_the_greatest():
    # the first round was slow for both, so the ratio of the medians would be another one
    assert row([40, 10, 20], [44, 13, 18]) == ["20 ms", "18 ms", "1.100", "0.900 to 1.300", ""]
    assert row([10.0], [12.5]) == ["10 ms", "12.5 ms", "1.250", "", ""]


@pytest.mark.parametrize(
    ("before", "after", "better", "verdict"),
    [
        (100, 105, "lower", ""),
        (100, 105.1, "lower", "**worse** by more than 5%"),
        (100, 50, "lower", ""),
        (100, 95, "higher", ""),
        (100, 94.9, "higher", "**worse** by more than 5%"),
        (100, 200, "higher", ""),
        (0, 0, "lower", ""),
        (0, 1, "lower", ""),
    ],
)
def test_a_figure_may_be_worse_by_its_tolerance(before, after, better, verdict):
    assert row([before], [after], better=better, tolerance=0.05)[-1] == verdict


def test_what_is_worse_in_some_rounds_only_is_perhaps_noise():
    assert row([10] * 3, [11, 12, 11], tolerance=0.05)[-1] == "**worse** by more than 5%"
    assert row([10] * 3, [11, 12, 10], tolerance=0.05)[-1] == "perhaps worse by more than 5%"
    assert row([10] * 3, [10, 12, 10], tolerance=0.05)[-1] == ""


@pytest.mark.parametrize(
    ("before", "after", "better", "verdict"),
    [
        # half of it, but only as much as is allowed
        (0.010, 0.005, "higher", ""),
        (0.450, 0.444, "higher", "**worse** by more than 0.005"),
        (0.450, 0.460, "higher", ""),
        (0.200, 0.206, "lower", "**worse** by more than 0.005"),
    ],
)
def test_a_share_may_be_worse_by_a_difference(before, after, better, verdict):
    assert row([before], [after], unit="share", better=better, tolerance=0.005)[-1] == verdict


def test_a_limit_holds_whatever_it_was_before():
    assert row([50], [31], limit=30)[-1] == "**misses** 30 ms"
    assert row([50], [30], limit=30)[-1] == ""
    assert row([0.5], [0.97], unit="share", better="higher", limit=0.98)[-1] == "**misses** 0.980"
    assert row([0.5], [0.98], unit="share", better="higher", limit=0.98)[-1] == ""
    # of the median, not of a round
    assert row([50] * 3, [29, 45, 28], limit=30)[-1] == ""


def test_two_files_are_compared(tmp_path, capsys):
    runs = [[figure("a/b", 10.0), figure("a/c", 1.0)], [figure("a/b", 11.0), figure("a/c", 1.0)]]
    files = [tmp_path / "before", tmp_path / "after"]
    for file, figures in zip(files, runs, strict=True):
        file.write_text(json.dumps({"figures": figures}))
    main(["compare", *map(str, files)])
    assert capsys.readouterr().out.splitlines() == [
        "| figure | before | after | ratio | spread |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a/b | 10 ms | 11 ms | 1.100 |  |  |",
        "| a/c | 1 ms | 1 ms | 1.000 |  |  |",
    ]
    main(["compare", *map(str, files), "--only", "*/c"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    for arguments in ([str(files[0])], [*map(str, files), "--trees", "x", "y"], []):
        with pytest.raises(SystemExit):
            main(["compare", *arguments])


def test_one_figure_is_measured_alone_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baseline, "SYNTHETIC", (20, 10))
    out = tmp_path / "out.json"
    main(["baseline", "--quick", "--only", "hits-tenants/0.3", "--out", str(out)])
    run = json.loads(out.read_text())
    assert run["quick"]
    (found,) = run["figures"]
    assert (found["name"], found["unit"], found["better"], found["tolerance"]) == (
        "hits-tenants/0.3",
        "share",
        "higher",
        0.005,
    )
    assert 0 < found["value"] < 1
    assert found["note"].startswith("10 requests")
    assert f"| hits-tenants/0.3 | {found['value']:.3f} |  | 10 requests" in capsys.readouterr().out
    for name in ("no-such-figure", "hits-tenants/0.4"):
        with pytest.raises(SystemExit) as ended:
            main(["baseline", "--quick", "--only", name])
        assert ended.value.code


@pytest.mark.parametrize("name", synthetic.TRACES)
def test_a_made_up_trace_is_the_same_each_time_and_equal_blocks_are_equal_prefixes(name):
    prompts = synthetic.prompts(name, 60)
    assert synthetic.prompts(name, 60) == prompts
    assert synthetic.prompts(name, 50) == prompts[:50]
    before = {}
    for prompt in prompts:
        for at, block in enumerate(prompt):
            assert before.setdefault(block, prompt[:at]) == prompt[:at]
    assert len(synthetic.TRACES) == 9
