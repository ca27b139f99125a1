"""The command ``shim``, and what the program that it writes runs: llama-server behind ``prefixstore serve``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from prefixstore.backends.files import expanded
from prefixstore.backends.location import is_url, without_password
from prefixstore.cli.app import run
from prefixstore.cli.command import Result
from prefixstore.cli.named_files import writing
from prefixstore.cli.output import say
from prefixstore.errors import InvalidParameterError
from prefixstore.server.child import check_options, check_program

PROGRAM = "llama-server"
SCRIPT = """\
#!/bin/sh
# written by prefixstore shim: llama-server, behind prefixstore serve
exec {python} -m prefixstore.cli.shim {serve} -- {program} "$@"
"""
# llama-server says something and exits
SAYING = frozenset(
    {"-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--completion-bash", "--list-devices"}
)


def shim(
    directory: Path, *, store: str | None = None, config: Path | None = None, llama_server: Path | None = None
) -> Result:
    """Write a llama-server that runs behind the proxy, for programs that start one.

    The program DIR/llama-server takes llama-server's own command line. It starts llama-server behind prefixstore serve,
    at the address that --host and --port name, with the same signals, exit codes and --version. With options that
    cannot be used behind the proxy, it says so and starts llama-server alone.

    Example: prefixstore shim ~/bin --store lmdb:///var/cache/kv --llama-server /usr/local/bin/llama-server
    """
    file = directory / PROGRAM
    found = shutil.which(PROGRAM) if llama_server is None else expanded(llama_server)
    if found is None:
        raise InvalidParameterError(f"{PROGRAM} is not on the PATH; pass --llama-server FILE")
    program = os.path.abspath(found)  # noqa: PTH100 - a link must stay one: it may be replaced by a newer version
    if os.path.realpath(program) == os.path.realpath(file):
        raise InvalidParameterError(f"{file} would start itself; pass --llama-server FILE, or another directory")
    check_program([program], os.environ)
    if not directory.is_dir():
        raise InvalidParameterError(f"{directory} is not a directory; create it")
    place = store if store is None or is_url(store) else os.path.abspath(expanded(store))  # noqa: PTH100 - as above
    serve = [] if place is None else [place]
    serve += [] if config is None else ["--config", str(config.absolute())]
    text = SCRIPT.format(python=shlex.quote(sys.executable), serve=shlex.join(serve), program=shlex.quote(program))
    is_secret = place is not None and without_password(place) != place
    with writing(str(file), mode=0o700 if is_secret else 0o755, replace=False) as written:
        written.write(text.encode())
    return Result(
        {"file": str(file), "llama_server": program, "location": place and without_password(place)},
        f"{file} written: it starts {program} behind prefixstore serve",
    )


def run_shim(argv: Sequence[str]) -> int:
    """Run llama-server behind the proxy: the arguments of ``prefixstore serve``, ``--``, and those of llama-server."""
    at = argv.index("--")
    serve, (program, *given) = argv[:at], argv[at + 1 :]
    address: dict[str, str] = {
        name: os.environ[variable]
        for name, variable in (("--host", "LLAMA_ARG_HOST"), ("--port", "LLAMA_ARG_PORT"))
        if os.environ.get(variable)
    }
    options: list[str] = []
    left = iter(given)
    for argument in left:
        if argument in ("--host", "--port"):
            address[argument] = next(left, "")
        else:
            options.append(argument)
    try:
        if address.get("--host", "").endswith(".sock"):
            raise InvalidParameterError("--host with a socket cannot be used behind the proxy")
        check_options(options, os.environ)
        # llama-server itself refuses what is not a number
        is_alone = not SAYING.isdisjoint(options) or not address.get("--port", "0").isdecimal()
    except InvalidParameterError as error:
        say(f"prefixstore: {error}; llama-server is started without the store")
        is_alone = True
    if is_alone:
        os.execv(program, [program, *given])  # noqa: S606 - it takes the place of this process
    where = [text for name, value in address.items() for text in (name, value)]
    # llama-server has no other code for a failure
    return min(run(["serve", *serve, *where, "--", program, *options]), 1)


if __name__ == "__main__":
    sys.exit(run_shim(sys.argv[1:]))
