"""``python -m benchmarks compare``: the figures of two runs of ``baseline`` beside each other, or of two trees.

Two trees are measured in turns, each in processes of its own, so that a noisy moment of the machine affects both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.baseline import MEASUREMENTS, is_asked, shown
from benchmarks.tables import table

Figures = dict[str, dict[str, Any]]

HEAD = ["figure", "before", "after", "ratio", "spread", ""]
# of trees; fewer take noise for a change
ROUNDS = 5
NOTHING = {"value": None, "unit": "", "note": "not measured"}


def measured(tree: Path, name: str, quick: bool) -> Figures:
    """The figures of a measurement, by the code of a tree."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "benchmarks", "baseline", "--only", name, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command += ["--quick"] if quick else []
        # it says itself what fails
        subprocess.run(command, check=False, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
        if not out.exists():
            return {name: NOTHING | {"name": name, "note": f"failed in {tree}"}}
        return by_name(json.loads(out.read_text()))


def by_name(run: dict[str, Any]) -> Figures:
    return {figure["name"]: figure for figure in run["figures"]}


def in_turns(trees: Sequence[Path], name: str, rounds: int, quick: bool) -> list[tuple[Figures, Figures]]:
    """The figures of both trees, round by round; every second round begins with the other tree."""
    found = []
    # a replay gives the same each time
    for turn in range(1 if name.startswith("hits-") else rounds):
        order = [0, 1] if turn % 2 == 0 else [1, 0]
        taken = {i: measured(trees[i], name, quick) for i in order}
        found.append((taken[0], taken[1]))
    return found


def rows(rounds: Sequence[tuple[Figures, Figures]]) -> Iterator[list[str]]:
    """What is printed of the figures that are in either run, in any round."""
    for name in dict.fromkeys(name for pair in rounds for figures in pair for name in figures):
        pairs = [(before.get(name, NOTHING), after.get(name, NOTHING)) for before, after in rounds]
        both = [pair for pair in pairs if pair[0]["value"] is not None and pair[1]["value"] is not None]
        cells = compared(both) if both else [*(shown(one["value"], one["unit"]) for one in pairs[-1]), "", "", ""]
        missing = dict.fromkeys(
            f"{when}: {figure['note']}"
            for pair in pairs
            for when, figure in zip(("before", "after"), pair, strict=True)
            if figure["value"] is None
        )
        yield [name, *cells[:-1], "; ".join(filter(None, [cells[-1], *missing]))]


def compared(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Medians, the median of the ratios with the least and the greatest, and whether it may be so."""
    # what was promised before counts
    figure, after = pairs[-1]
    values = [(old["value"], new["value"]) for old, new in pairs]
    ratios = [_ratio(old, new) for old, new in values]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else ""
    is_same = figure["note"] == after["note"]
    verdict = judged(figure, values) if is_same else f"not the same: {figure['note']}; {after['note']}"
    medians = (shown(median(each), figure["unit"]) for each in zip(*values, strict=True))
    return [*medians, f"{median(ratios):.3f}", spread, verdict]


def judged(figure: dict[str, Any], values: Sequence[tuple[float, float]]) -> str:
    """Why a figure may not be so; nothing if it may."""
    sign = 1 if figure["better"] == "lower" else -1
    is_share, limit, tolerance = figure["unit"] == "share", figure["limit"], figure["tolerance"]
    worse = [sign * (new - old if is_share else _ratio(old, new) - 1) for old, new in values]
    # what is allowed is, and so is what rounding adds
    if tolerance is not None and median(worse) > tolerance + 1e-9:
        by = f"{tolerance:g}" if is_share else f"{tolerance:.0%}"
        return f"{'**worse**' if min(worse) > tolerance else 'perhaps worse'} by more than {by}"
    if limit is not None and sign * (median(new for _, new in values) - limit) > 0:
        return f"**misses** {shown(limit, figure['unit'])}"
    return ""


def _ratio(before: float, after: float) -> float:
    return after / before if before else 1.0 if after == before else nan


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="BEFORE AFTER", help="two files of `baseline --out`")
    parser.add_argument("--trees", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two checkouts, measured in turns")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each figure of the trees is measured")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="as for `baseline`")
    parser.add_argument("--quick", action="store_true", help="as for `baseline`")
    given = parser.parse_args(arguments)
    if (len(given.runs) == 2) == bool(given.trees):
        parser.error("name two files, or two trees with --trees")
    if given.runs:
        before, after = (by_name(json.loads(path.read_text())) for path in given.runs)
        found = iter([[(before, after)]])
    else:
        names = (name for name in MEASUREMENTS if is_asked(name, given.only))
        trees = [tree.resolve() for tree in given.trees]
        found = (in_turns(trees, name, given.rounds, given.quick) for name in names)
    print("\n".join(table(HEAD, [])[:2]))
    for rounds in found:
        for row in rows(rounds):
            if is_asked(row[0], given.only):
                print(f"| {' | '.join(row)} |", flush=True)
