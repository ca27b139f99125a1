"""``python -m benchmarks [NAME ...]``: run all benchmarks, or those named; print, save and plot the results.

``python -m benchmarks baseline`` measures the figures that no change may make worse, ``compare`` two of its runs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp

from benchmarks import baseline, compare
from benchmarks.common import ROOT, machine, write_json

LATEST = ROOT / "benchmarks" / "results" / "latest.json"


def main(names: list[str]) -> None:
    if names[:1] in (["baseline"], ["compare"]):
        {"baseline": baseline, "compare": compare}[names[0]].main(names[1:])
        return
    # of matplotlib a figure of `baseline` needs nothing
    from benchmarks import plots, readme
    from benchmarks.report import BENCHMARKS, markdown, note_machine

    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark is named {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    # figures of two machines are never in one section, and a section of another machine says so
    here = machine()
    results: dict[str, Any] = {"machine": here}
    if names and LATEST.exists():
        results = json.loads(LATEST.read_text())
    has_gpu = llama_cpp.llama_supports_gpu_offload()
    for name in names or [name for name in BENCHMARKS if has_gpu or name != "gpu"]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = BENCHMARKS[name].run()
        note_machine(results, name, here)
        print("\n".join(BENCHMARKS[name].section(results[name])), flush=True)
        # save after each benchmark: a failure in the last one must not lose an hour of figures
        write_json(results, LATEST)
        (ROOT / "docs" / "benchmarks.md").write_text(markdown(results))
    readme.write(results)
    plots.write(results, ROOT / "docs" / "plots")


if __name__ == "__main__":
    main(sys.argv[1:])
