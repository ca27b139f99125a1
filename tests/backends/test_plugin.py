"""The backend that docs/backends.md shows: complete, short, installed as a package, and as good as our own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefixstore.backends import SCHEMES, open_backend
from prefixstore.errors import InvalidParameterError, MissingExtraError
from prefixstore.testing import PersistentBackendContract
from tests.support import PATIENCE

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs" / "backends.md").read_text(), re.DOTALL)
MODULE, PROJECT, CONTRACT = (
    next(block for block in BLOCKS if sign in block) for sign in ("class OneFile", "[project]", "TestOneFile")
)
USE = """
from prefixstore import PrefixStore
from prefixstore.backends import open_backend
store = PrefixStore("onefile://{path}", namespace="n")
print(type(open_backend(store.location, max_bytes=1)).__name__, store.check(), len(store))
store.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory into which pip has installed the package; and an environment in which Python finds it."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    (source / "prefixstore_onefile.py").write_text(MODULE)
    (source / "pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, timeout=120)
    return target, os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}


def test_the_example_has_at_most_seventy_lines_of_code():
    lines = [line for line in MODULE.splitlines() if line.strip()]
    assert 40 < len(lines) <= 70


@pytest.mark.slow
def test_an_installed_package_brings_a_scheme(installed, tmp_path):
    _, environment = installed
    command = [sys.executable, "-c", USE.format(path=tmp_path / "store")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert (done.stdout.strip(), done.stderr) == ("OneFile [] 0", "")


@pytest.mark.attack
def test_it_passes_the_contract(installed):
    target, environment = installed
    (target / "test_onefile.py").write_text(CONTRACT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_onefile.py"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=target, timeout=240
    )
    assert done.returncode == 0, done.stdout
    n_tests = sum(name.startswith("test_") for name in dir(PersistentBackendContract))
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == n_tests


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text("[prefixstore.backends]\nbroken = not_there:open_it\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match="not_there:open_it cannot be imported: No module named 'not_there'"):
        open_backend("broken://x", max_bytes=1)
    known = ", ".join(sorted([*SCHEMES, "broken"]))
    with pytest.raises(InvalidParameterError, match=f"known are {known}"):
        open_backend("other://x", max_bytes=1)
