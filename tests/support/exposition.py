"""Prometheus' text, read and checked as ``promtool check metrics`` does, and by the rules that it does not know."""

from __future__ import annotations

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

UNITS = {"seconds", "bytes"}
# what a unit is not called, or is not counted in
NOT_UNITS = {
    *("ms", "millis", "milliseconds", "us", "microseconds", "ns", "nanoseconds", "minutes", "hours", "days", "second"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "byte", "bits", "percent", "pct"),
}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All values, by name and labels; no series is there twice."""
    found = [
        ((one.name, frozenset(one.labels.items())), one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    ]
    assert [series for series, n in Counter(series for series, _ in found).items() if n > 1] == []
    return dict(found)


def value(text: str, name: str, **labels: str) -> float:
    """The value of one series, which has these labels and no others."""
    return samples(text)[name, frozenset(labels.items())]


def names(text: str) -> set[str]:
    """The names of all series."""
    return {name for name, _ in samples(text)}


def problems(text: str) -> list[str]:
    """What is wrong with a text, by Prometheus' conventions."""
    found: list[str] = []
    for kind in ("HELP", "TYPE"):
        said = Counter(re.findall(rf"^# {kind} (\S+) \S", text, re.MULTILINE))
        found += [f"{name}: {n} lines of {kind}" for name, n in said.items() if n > 1]
        missing = {
            name for name in names(text) if not ({name, re.sub(r"_(bucket|sum|count)$", "", name)} & said.keys())
        }
        found += [f"{name}: no {kind}" for name in sorted(missing)]
    for family in text_string_to_metric_families(text):
        name = family.name
        found += name_problems(name)
        if family.type not in ("counter", "gauge", "histogram"):
            found.append(f"{name}: of type {family.type}")
        if family.type != "counter" and re.search(r"_(total|count|sum|bucket|info)$", name):
            found.append(f"{name}: a suffix that its type does not have")
        if family.type == "counter":
            found += [f"{one.name}: a counter without _total" for one in family.samples if one.name != f"{name}_total"]
        if family.type != "gauge":
            found += [f"{one.name}: falls below 0" for one in family.samples if not one.value >= 0]
        if family.type == "histogram":
            found += histogram_problems(name, family.samples)
        labels = {tuple(label for label in one.labels if label != "le") for one in family.samples}
        found += [f"{name}: labels {sorted(labels)}"] * (len(labels) > 1)
    return found


def name_problems(name: str) -> list[str]:
    parts, found = name.split("_"), []
    if not re.fullmatch(r"prefixstore(_[a-z]+)+", name):
        found.append(f"{name}: not a name of ours")
    if NOT_UNITS & set(parts):
        found.append(f"{name}: not a base unit")
    if (UNITS & set(parts)) - {parts[-1]}:
        found.append(f"{name}: the unit is not its end")
    return found


def histogram_problems(name, its_samples):
    found, series = [], {}
    for one in its_samples:
        labels = frozenset((label, text) for label, text in one.labels.items() if label != "le")
        here = series.setdefault(labels, {"buckets": []})
        if one.name.endswith("_bucket"):
            here["buckets"].append((float(one.labels["le"]), one.value))
        else:
            here[one.name.removeprefix(f"{name}_")] = one.value
    for here in series.values():
        bounds, counts = zip(*here["buckets"], strict=True)
        if list(bounds) != sorted(set(bounds)) or bounds[-1] != float("inf"):
            found.append(f"{name}: bounds {bounds}")
        if list(counts) != sorted(counts) or counts[-1] != here["count"] or "sum" not in here:
            found.append(f"{name}: counts {counts}")
    return found
