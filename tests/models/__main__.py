"""``python -m tests.models [NAME...]``: what is saved for each model, through both doors, after a restart."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.models.catalogue import DECODERS
from tests.models.generate import CannotGenerateError, generate
from tests.models.matrix import DOORS, rows
from tests.models.records import Row, Settings
from tests.models.report import line, write_document


def main(arguments: list[str]) -> int:
    """Run the matrix; 1 if a row misses its criterion."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all, if none is named")
    parser.add_argument("--write-docs", action="store_true", help="write docs/models.md")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(DECODERS)):
        parser.error(f"unknown: {' '.join(unknown)}; known are {' '.join(DECODERS)}")
    found: list[Row] = []
    for name in given.names or DECODERS:
        model = DECODERS[name]
        with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
            place = Path(directory)
            try:
                new = list(rows(model, generate(model, place), Settings(), DOORS, place))
            except CannotGenerateError as error:
                new = [Row(name, model.memory, "", failed=str(error))]
        found += new
        print("\n".join(map(line, new)), flush=True)
    if given.write_docs:
        write_document(found)
    return int(any(row.misses() for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
