"""``python -m benchmarks [NAME ...]``: run, print, and write the figures down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.common import machine, write_json
from benchmarks.report import BENCHMARKS, markdown

ROOT = Path(__file__).parent.parent


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known are {', '.join(BENCHMARKS)}")
    results: dict[str, Any] = {"machine": machine()}
    for name in names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = BENCHMARKS[name].run()
    text = markdown(results)
    print(text)
    if not names:
        write_json(results, ROOT / "benchmarks" / "results" / "latest.json")
        (ROOT / "docs" / "benchmarks.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
