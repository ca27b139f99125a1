"""The source distribution and the wheel built from it: what is in them, and what PyPI shows."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from prefixstore import __version__

ROOT = Path(__file__).parents[1]
NAME = f"prefixstore-{__version__}"
URL = "https://github.com/prefixstore/prefixstore"


def build(target: str, folder: Path, out: Path) -> Path:
    """Build with the packages that are installed, without an index."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=280)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    with zipfile.ZipFile(build("wheel", folder / NAME, tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))


@pytest.mark.slow
def test_the_source_distribution_can_be_built_and_tested(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert names >= {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "migrations/env.py",
        "prefixstore/py.typed",
        "tests/conftest.py",
        "docs/design.md",
    }
    assert not [name for name in names if name.startswith((".ci", ".venv", "shared"))]
    assert not [name for name in names if name.endswith((".pyc", ".gguf", ".whl"))]


def test_the_wheel_has_the_whole_package_its_migrations_and_nothing_else(wheel):
    names = set(wheel.namelist())
    files = [*(ROOT / "prefixstore").rglob("*.py"), *(ROOT / "prefixstore" / "report" / "page").iterdir()]
    package = {str(path.relative_to(ROOT)) for path in files}
    migrations = {f"prefixstore/{path.relative_to(ROOT)}" for path in (ROOT / "migrations").rglob("*.py")}
    assert names >= package | migrations | {"prefixstore/py.typed", "prefixstore/migrations/script.py.mako"}
    assert {name.split("/")[0] for name in names} == {"prefixstore", f"{NAME}.dist-info"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "prefixstore = prefixstore.cli:main" in wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()


def test_links_and_pictures_of_the_readme_work_outside_the_repository(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "mailto:", "#"))] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    raw = "https://raw.githubusercontent.com/prefixstore/prefixstore/main/"
    for picture in pictures:
        assert (ROOT / picture.removeprefix(raw)).is_file(), picture
    for link in set(targets) - set(pictures):
        path = link.removeprefix(f"{URL}/blob/main/").split("#")[0]
        assert path.startswith(("http", "mailto:")) or not path or (ROOT / path).is_file(), link
