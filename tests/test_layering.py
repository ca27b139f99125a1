"""Which folder may import from which, and what is public: read from the imports, without running anything."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import prefixstore

PACKAGE = Path(prefixstore.__file__).parent

# A place imports only from those before it. A place is a folder, or a module at the top.
PLACES = """
errors units buffers counters results format backends engine traces testing parameters opening models llama store
sessions config warming maintenance metrics diagnosis report server demo prefixstore cli __main__
""".split()  # noqa: SIM905 - to be read at a glance

CORE = {"lmdb", "numpy", "xxhash", "zstandard"}
# what each place may import at the top of its modules, beside the standard library
NEEDS = {
    "llama": CORE | {"llama_cpp"},  # the extra "llama"
    "backends.sql": CORE | {"sqlalchemy", "alembic", "psycopg"},  # the extras "sql" and "postgres"
    "backends.valkey": CORE | {"valkey"},  # the extra "valkey"
    "backends.objects": CORE | {"obstore"},  # the extra "s3"
    "backends.sealing": CORE | {"cryptography"},  # the extra "encryption"
    "warming.tokens": CORE | {"llama_cpp"},
    "server": CORE,
    # the extra "server"
    "server.exchange": {"aiohttp", "multidict"},
    "server.proxy": CORE | {"aiohttp"},
    "server.serving": CORE | {"aiohttp"},
    "server.upstream": {"aiohttp", "multidict", "yarl"},
    "cli": CORE | {"rich", "typer"},  # the extra "cli"
    # the extra "python-server"
    "server.completions": CORE | {"llama_cpp", "starlette"},
    "server.sequences": CORE | {"llama_cpp"},
    "server.python_server": CORE | {"llama_cpp", "fastapi", "pydantic", "uvicorn"},
}
# what is imported inside the functions that need it, or for type checkers
LAZY = {
    "opening": {"typing_extensions"},
    "store": {"llama_cpp"},
    "sessions": {"llama_cpp", "typing_extensions"},
    "config": {"llama_cpp"},
    "metrics": {"prometheus_client"},  # the extra "server"
    "warming": {"llama_cpp", "typing_extensions"},
    "maintenance": {"llama_cpp"},
    "diagnosis": {"llama_cpp"},
    "server": {"typing_extensions"},
    "server.python_server": {"prometheus_client"},
    "cli": {"llama_cpp"},
    "testing": {"gguf", "tokenizers"},  # the extra "demo"
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "prefixstore"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


parsed = functools.cache(lambda path: ast.parse(path.read_text()))


@functools.cache
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

    visit(parsed(path))
    return found


def inside(names: set[str]) -> set[str]:
    return {name.removeprefix("prefixstore.") for name in names if name.split(".")[0] == "prefixstore"}


def outside(names: set[str]) -> set[str]:
    roots = {name.split(".")[0] for name in names}
    return roots - {"prefixstore", "__future__"} - set(sys.stdlib_module_names)


def allowed(table: dict[str, set[str]], module: str) -> set[str]:
    """What the table gives the longest of the folders that the module lies in."""
    parts = module.split(".")
    names = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((table[name] for name in names if name in table), set())


def upward() -> Iterator[str]:
    for name, path in MODULES.items():
        before = set(PLACES[: PLACES.index(place(name)) + 1])
        yield from (
            f"{name} imports {other}" for other in inside(imports(path, lazy=False)) if place(other) not in before
        )


def test_a_place_imports_only_from_the_places_below_it():
    assert {place(name) for name in MODULES} == set(PLACES)
    assert list(upward()) == []


def test_no_two_modules_import_each_other():
    graph = {name: inside(imports(path, lazy=False)) & MODULES.keys() for name, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_core_needs_four_packages_and_only_the_llama_package_imports_llama_cpp():
    for name, path in MODULES.items():
        top, all_of_them = outside(imports(path, lazy=False)), outside(imports(path, lazy=True))
        needs = allowed(NEEDS, name) or CORE
        assert top <= needs, name
        assert all_of_them <= needs | allowed(LAZY, name), name


def test_nothing_public_appears_or_disappears_unnoticed():
    assert prefixstore.__all__ == sorted(prefixstore.__all__)
    assert [name for name in prefixstore.__all__ if not hasattr(prefixstore, name)] == []
    assert " ".join(prefixstore.__all__) == (
        "BusyError ClosedError ContextError CorruptError Evicted Explanation FullError IncompatibleError "
        "InvalidParameterError KeyProvider LastPrompt LocationError Match MissingExtraError MisuseError Namespace "
        "NotAttachedError PrefixStore PrefixStoreError Problem Progress StaleLeaseError Stats StorageError "
        "UnavailableError UndecryptableError Violation WarmReport load warm"
    )


def test_public_names_and_files_exist_once():
    defined: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        of_module = [
            one.name
            for one in parsed(path).body
            if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and one.name[0] != "_"
        ]
        # `cli.warm.warm` is the command that calls `warm`
        for one in {path.name, *of_module} - {"__init__.py", *({"warm"} if name == "cli.warm" else ())}:
            defined.setdefault(one, []).append(name)
    assert {one: names for one, names in defined.items() if len(names) > 1} == {}
