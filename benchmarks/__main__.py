"""``python -m benchmarks [NAME ...]``: run all benchmarks, or those named; print, save and plot the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.common import machine, write_json
from benchmarks.report import BENCHMARKS, markdown

ROOT = Path(__file__).parent.parent
LATEST = ROOT / "benchmarks" / "results" / "latest.json"


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark is named {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    # never mix figures of two machines
    results: dict[str, Any] = {"machine": machine()}
    if names and LATEST.exists():
        known = json.loads(LATEST.read_text())
        if all(known["machine"][fact] == results["machine"][fact] for fact in ("cpu", "cores", "llama_cpp_python")):
            results |= {name: figures for name, figures in known.items() if name in BENCHMARKS}
    for name in names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = BENCHMARKS[name].run()
        print("\n".join(BENCHMARKS[name].section(results[name])), flush=True)
        # save after each benchmark: a failure in the last one must not lose an hour of figures
        write_json(results, LATEST)
        (ROOT / "docs" / "benchmarks.md").write_text(markdown(results))
    plots.write(results, ROOT / "docs" / "plots")


if __name__ == "__main__":
    main(sys.argv[1:])
