"""``python -m tests.support.untimed MODULE …`` runs a module, or a file, as Python does, without timeouts.

For programs whose restores a test counts, in a process of its own: see `tests.support.timeouts`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.support.timeouts import disable_timeouts


def untimed(*arguments: object) -> list[str]:
    """The command that runs a module, or a file that ends with ``.py``, with arguments."""
    return [sys.executable, "-m", __name__, *map(str, arguments)]


def main() -> None:
    disable_timeouts()
    sys.argv = sys.argv[1:]
    program = sys.argv[0]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
