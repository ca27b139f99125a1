"""What ``prefixstore serve`` says of packages that are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{package}":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize(
    ("package", "code", "says"),
    [
        (
            "fastapi",
            "from prefixstore.cli import main; sys.exit(main(['serve', 'kv', '--model', 'm.gguf']))",
            "prefixstore[python-server]",
        ),
        ("fastapi", "from prefixstore.server import create_app", "MissingExtraError: create_app needs fastapi; pip"),
        (
            "aiohttp",
            "from prefixstore.cli import main; sys.exit(main(['serve', 'kv', '--', 'llama-server']))",
            "serve needs aiohttp",
        ),
    ],
)
def test_a_missing_package_is_told_with_its_extra(package, code, says):
    program = WITHOUT.format(package=package) + code
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert says in done.stderr
