"""Plots of the results, for ``docs/plots``: one message each."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from benchmarks.comparison import STAYED, WORKLOADS
from benchmarks.comparison import plot as name_of
from benchmarks.peers import NOTHING, RAM

DPI = 110
OURS, PEER, LIMIT = "#1f5fa8", "#b36b1d", "#555555"
STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "0"}


def label(seconds: float) -> str:
    """Seconds, short."""
    if seconds >= 0.9995:
        return f"{seconds:.2g} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def first_token(model: str, by_workload: dict[str, Any]) -> Figure:
    """Time to the first token, median and slowest, with an empty cache and after a restart, cache by cache."""
    figure = Figure(figsize=(9, 7.6), layout="constrained")
    figure.suptitle(f"Time to the first token, {model} model: an empty cache, and after a restart", fontsize=11)
    axes = figure.subplots(2, 2).flat
    for axis, (name, found) in zip(axes, by_workload.items(), strict=False):
        bars: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = []
        for cache, figures in found.items():
            bars.append((cache, figures["cold"], figures["warm"]))
            if cache == RAM:
                bars.append((STAYED, None, figures["stayed"]))
        for row, (cache, cold, warm) in enumerate(reversed(bars)):
            colour = OURS if cache.startswith("prefixstore") else LIMIT if cache == NOTHING else PEER
            for offset, phase, fill in ((0.2, cold, "none"), (-0.2, warm, colour)):
                if phase is None:
                    continue
                seconds = phase["seconds"]
                axis.barh(row + offset, seconds["p50"], 0.36, color=fill, edgecolor=colour, linewidth=1)
                axis.plot([seconds["p50"], seconds["p95"]], [row + offset] * 2, color="black", linewidth=0.8)
                axis.plot(seconds["p95"], row + offset, "|", color="black", markersize=6)
                axis.annotate(
                    f"{label(seconds['p50'])} … {label(seconds['p95'])}",
                    (seconds["p95"], row + offset),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
        axis.set_yticks(range(len(bars)), [cache for cache, _, _ in reversed(bars)])
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        shortest = min(phase["seconds"]["p50"] for _, *both in bars for phase in both if phase is not None)
        axis.set_xlim(min(low, shortest / 3), high * 5)
        axis.tick_params(axis="x", labelsize=7)
        low, high = axis.get_xlim()
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 200 * low else (1,)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(WORKLOADS[name], fontsize=9.5)
    figure.supxlabel(
        "log scale; hollow bar: empty cache, full bar: after a restart; bar: the median, line: to the slowest",
        fontsize=8,
    )
    return figure


def lines(figure: Figure, curves: dict[str, tuple[list[float], list[float]]], styles: dict[str, dict[str, Any]]) -> Any:
    """Curves labelled at their right ends, labels moved apart where they would overlap; logarithmic y axis."""
    axis = figure.subplots()
    axis.set_yscale("log")
    for name, (x, y) in curves.items():
        axis.plot(x, y, markersize=4, linewidth=1.4, **styles[name])
    figure.draw_without_rendering()
    ends = sorted((axis.transData.transform((x[-1], y[-1]))[1], name) for name, (x, y) in curves.items())
    least = 11 * figure.dpi / 72
    at = -float("inf")
    for height, name in ends:
        x, y = curves[name]
        at = max(height, at + least)
        axis.annotate(
            name,
            (x[-1], y[-1]),
            xytext=(7, (at - height) * 72 / figure.dpi),
            textcoords="offset points",
            va="center",
            color=styles[name]["color"],
            annotation_clip=False,
        )
    return axis


def restore(result: dict[str, Any]) -> Figure:
    """Restore time against tokens."""
    styles = {
        "memcpy": {"color": LIMIT, "linestyle": ":", "marker": "."},
        "limit": {"color": LIMIT, "linestyle": "-", "marker": "."},
        "raw": {"color": OURS, "linestyle": "-", "marker": "o"},
        "auto": {"color": OURS, "linestyle": "--", "marker": "s"},
        "load_file": {"color": PEER, "linestyle": "--", "marker": "^"},
        "load_state": {"color": PEER, "linestyle": "-", "marker": "v"},
    }
    names = {
        "memcpy": "memcpy",
        "limit": "the limit: one set_data",
        "raw": "prefixstore, raw",
        "auto": "prefixstore, auto",
        "load_file": "llama_state_load_file",
        "load_state": "Llama.load_state",
    }
    tokens = [int(n) for n in result]
    figure = Figure(figsize=(7.6, 4.2), dpi=DPI, layout="constrained")
    axis = lines(
        figure,
        {names[name]: (tokens, [figures[name]["p50"] for figures in result.values()]) for name in names},
        {names[name]: style for name, style in styles.items()},
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axis.set_xlabel("tokens, 32 KiB of state each (log scale)")
    axis.set_title("Restore time against the number of tokens (log scale)", loc="left", fontsize=10)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    return figure


def saving(result: dict[str, Any]) -> Figure:
    """The foreground cost of saving, turn by turn."""
    figure = Figure(figsize=(7.6, 3.8), dpi=DPI, layout="constrained")
    markers = iter((("v", "-"), ("^", "--"), ("s", ":")))
    styles: dict[str, dict[str, Any]] = {}
    for name in result:
        mark, line = ("o", "-") if name == "prefixstore" else next(markers)
        styles[name] = {"color": OURS if name == "prefixstore" else PEER, "marker": mark, "linestyle": line}
    curves = {
        name: (list(range(1, len(figures["seconds_per_turn"]) + 1)), figures["seconds_per_turn"])
        for name, figures in result.items()
    }
    axis = lines(figure, curves, styles)
    axis.set_xticks(range(1, 21))
    axis.set_xlabel("turn of the conversation, 300 new tokens each")
    axis.set_title("What saving a turn costs the foreground (log scale)", loc="left", fontsize=10)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    return figure


def hits(result: dict[str, Any]) -> Figure:
    """Hit rate against the size of the cache."""
    result = result["conversation"]["hits"]
    figure = Figure(figsize=(7.6, 4.2), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    capacities = [float(capacity) for capacity in next(iter(result.values()))]
    marks = dict(zip(result, "os^Dv<P>Xph*", strict=False))
    for policy, found in result.items():
        colour = OURS if policy == "adaptive" else LIMIT if policy == "belady" else PEER
        width = 2 if policy == "adaptive" else 1
        axis.plot(
            capacities, found.values(), marker=marks[policy], markersize=5, color=colour, linewidth=width, label=policy
        )
    axis.set_xscale("log")
    axis.set_xticks(capacities, [f"{capacity:.0%}" for capacity in capacities])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(0)
    axis.set_xlabel("capacity, as a fraction of the unique blocks (log scale)")
    axis.set_title("Share of blocks found, Mooncake conversation trace", loc="left", fontsize=10)
    axis.legend(frameon=False, loc="lower right")
    return figure


def write(results: dict[str, Any], directory: Path) -> None:
    """Write every plot whose results are there."""
    directory.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        figures: dict[str, Figure] = {}
        for model, by_workload in (results.get("comparison") or {}).items():
            figures[Path(name_of(model)).name] = first_token(model, by_workload)
        for name, section, draw in (
            ("restore.png", "sweep", restore),
            ("saving.png", "conversation", saving),
            ("hits.png", "eviction", hits),
        ):
            if results.get(section):
                figures[name] = draw(results[section])
        for name, figure in figures.items():
            drawn = BytesIO()
            figure.savefig(drawn, dpi=DPI, metadata={"Software": None})
            # a few colours are enough, and take a third of the bytes
            Image.open(drawn).convert("RGB").quantize(24).save(directory / name, optimize=True)
