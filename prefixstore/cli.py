"""The command line: ``prefixstore demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from prefixstore.demo import run
from prefixstore.errors import PrefixStoreError

__all__ = ["main"]

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 failed, 2 misused (from argparse)."""
    parser = argparse.ArgumentParser(prog="prefixstore", description="A persistent prefix cache for llama-cpp-python.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="compute a prompt in one process, restore it in another")
    demo.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file; by default a small one is written")
    options = parser.parse_args(arguments)
    try:
        return run(options.model)
    except PrefixStoreError as error:
        print(f"prefixstore: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
