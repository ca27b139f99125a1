"""``python -m prefixstore.server``."""

import sys


def main() -> int:
    """Run the command and return its exit code."""
    try:
        from prefixstore.server.python_server import main as serve  # noqa: PLC0415 - the extra "python-server"
    except ModuleNotFoundError as error:
        sys.stderr.write(f'prefixstore: the server needs {error.name}; pip install "prefixstore[python-server]"\n')
        return 2
    return serve()


if __name__ == "__main__":
    raise SystemExit(main())
