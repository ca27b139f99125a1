"""Who may import whom: the order of the modules in ``docs/design.md``, kept by reading their imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import prefixstore

PACKAGE = Path(prefixstore.__file__).parent

# a module imports only from those before it
ORDER = """
errors namespace boundaries record buffers packing encoder codec index snapshots adaptive eviction budget stats breaker
backends.location backends.durable backends.base backends.memory backends.tiered backends.lmdb_scrub
backends.lmdb_sound backends.lmdb_environment backends.lmdb
backends.sql_schema backends.sql_engine backends.sql_revisions backends.sqlite_file backends.sqlite
backends.postgresql backends.sql_backend backends.sql backends.migrate backends
candidates new_page catalog
reading read_ahead read_along serving fetch room commit check engine writer purge admin intake transfer
llama llama.synthetic llama.pace llama.blob llama.parse llama.shape llama.memory llama.fingerprint llama.borders
llama.stops llama.standing llama.lineage llama.restore llama.resume llama.capture llama.snapshots llama.hook
llama.place llama.whole llama.states llama.portable
llama.prompt llama.vocabulary
store config leases plan prompts walk warming estimate verify bench
testing.contract testing.faults testing prefixstore demo
cli.output cli.model cli.look cli.care cli.move cli.measure cli.progress cli.warm cli.app cli __main__
""".split()  # noqa: SIM905 - to be read at a glance

CORE_NEEDS = {"lmdb", "numpy", "xxhash", "zstandard"}
LLAMA_NEEDS = CORE_NEEDS | {"llama_cpp"}
# what makes models for demonstrations and tests: the extra "demo"
DEMO_NEEDS = LLAMA_NEEDS | {"gguf", "tokenizers"}

# of SQL stores: the extras "sql" and "postgres"
SQL_NEEDS = {
    f"backends.{name}": CORE_NEEDS | needs
    for name, needs in {
        "sql_schema": {"sqlalchemy"},
        "sql_revisions": {"alembic", "sqlalchemy"},
        "sql_engine": {"sqlalchemy"},
        "sqlite_file": {"sqlalchemy"},
        "sqlite": {"sqlalchemy"},
        "postgresql": {"psycopg", "sqlalchemy"},
        "sql_backend": {"sqlalchemy"},
    }.items()
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "prefixstore"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path, *, lazy: bool) -> set[str]:
    """Names of the imported modules: those at the top, or those inside functions and for type checkers too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not lazy and (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_for_types_only(node)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            ours = [name for name in names if name.removeprefix("prefixstore.") in MODULES]
            found.update(ours if len(ours) == len(names) else [node.module])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def inside(names: set[str]) -> set[str]:
    return {name.removeprefix("prefixstore.") for name in names if name.split(".")[0] == "prefixstore"}


def outside(names: set[str]) -> set[str]:
    roots = {name.split(".")[0] for name in names}
    return roots - {"prefixstore", "__future__"} - set(sys.stdlib_module_names)


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_modules_before_it(name):
    before = set(ORDER[: ORDER.index(name)])
    assert inside(imports(MODULES[name], lazy=False)) - before == set()


@pytest.mark.parametrize("name", MODULES)
def test_the_core_needs_four_packages_and_only_the_llama_package_imports_llama_cpp(name):
    allowed = DEMO_NEEDS if name == "llama.synthetic" else LLAMA_NEEDS if name.startswith("llama") else CORE_NEEDS
    allowed = SQL_NEEDS.get(name, allowed)
    if name.startswith("cli."):
        allowed = allowed | {"rich", "typer"}  # the extra "cli"
    # for type checkers, and inside the functions that need it
    lazily = {"store": {"llama_cpp", "typing_extensions"}, "demo": {"llama_cpp"}, "leases": {"typing_extensions"}}
    with_a_model = ("config", "prompts", "walk", "warming", "estimate", "verify", "bench", "cli.warm")
    lazily |= {module: {"llama_cpp"} for module in with_a_model}
    lazily |= {"admin": {"typing_extensions"}, "cli.model": {"tokenizers"}}
    assert outside(imports(MODULES[name], lazy=False)) - allowed == set()
    assert outside(imports(MODULES[name], lazy=True)) - allowed - lazily.get(name, set()) == set()


def test_only_these_import_lazily_from_the_llama_package():
    def of_llama(name, *, lazy):
        return {found for found in inside(imports(MODULES[name], lazy=lazy)) if found.split(".")[0] == "llama"}

    core = [name for name in MODULES if name.split(".")[0] != "llama"]
    assert [name for name in core if of_llama(name, lazy=False)] == []
    assert [name for name in core if of_llama(name, lazy=True)] == ["cli.model", "demo", "prompts", "store", "verify"]


def test_nothing_that_is_public_appears_or_goes_unnoticed():
    assert prefixstore.__all__ == [
        "ClosedError",
        "ContextError",
        "CorruptError",
        "FullError",
        "IncompatibleError",
        "InvalidParameterError",
        "LocationError",
        "Match",
        "MissingExtraError",
        "MisuseError",
        "Namespace",
        "NotAttachedError",
        "PrefixStore",
        "PrefixStoreError",
        "Problem",
        "Progress",
        "Stats",
        "StorageError",
        "UnavailableError",
        "Violation",
        "WarmReport",
        "load",
        "warm",
    ]
    assert prefixstore.__all__ == sorted(prefixstore.__all__)
    assert [name for name in prefixstore.__all__ if not hasattr(prefixstore, name)] == []


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"prefixstore", "backends", "llama", "testing", "__main__"}))
def test_what_a_module_offers_is_defined_in_it(name):
    tree = ast.parse(MODULES[name].read_text())
    defined: set[str] = set()
    offered: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            defined.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        defined |= names
        if "__all__" in names:
            offered = ast.literal_eval(node.value)
    assert set(offered) - defined == set()
    assert name == "errors" or offered
