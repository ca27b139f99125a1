"""``python -m tests.models [NAME...]``: what is saved for each model, through both doors, after a restart."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.models.catalogue import DECODERS
from tests.models.generate import CannotGenerateError, generate
from tests.models.matrix import DOORS, rows
from tests.models.records import Row, Settings
from tests.models.report import heading, line, write_document


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all, if none is named")
    parser.add_argument("--door", choices=(*DOORS, "both"), default="both")
    parser.add_argument("--fa", choices=("on", "off"), default="on", help="flash attention")
    parser.add_argument("--kv", choices=("f16", "q8_0"), default="f16", help="type of K and V")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there")
    parser.add_argument("--read", type=Path, action="append", metavar="JSON", help="add the rows of an earlier run")
    parser.add_argument("--write-docs", action="store_true", help="write docs/models.md")
    cache = Path(tempfile.gettempdir()) / "prefixstore-models"
    parser.add_argument("--cache", type=Path, metavar="DIR", default=cache, help="where generated models are kept")
    found = parser.parse_args(arguments)
    if unknown := sorted(set(found.names) - set(DECODERS)):
        parser.error(f"unknown: {' '.join(unknown)}; known are {' '.join(DECODERS)}")
    return found


def main(arguments: list[str]) -> int:
    """Run the matrix; 1 if a row misses its criterion."""
    given = parsed(arguments)
    settings, doors = Settings(given.fa, given.kv), DOORS if given.door == "both" else (given.door,)
    found = [Row.of_json(row) for path in given.read or () for row in json.loads(path.read_text())]
    print("\n".join([heading(), *map(line, found)]), flush=True)
    for name in given.names or (() if found else DECODERS):
        model = DECODERS[name]
        with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
            try:
                path = generate(model, given.cache)
            except CannotGenerateError as error:
                found.append(Row(name, model.memory, "", settings, failed=str(error)))
                print(line(found[-1]), flush=True)
                continue
            for row in rows(model, path, settings, doors, Path(directory)):
                found.append(row)
                print(line(row), flush=True)
        if given.json:
            given.json.write_text(json.dumps([row.as_json() for row in found], indent=1) + "\n")
    if given.write_docs:
        write_document(found)
    return int(any(row.misses() for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
