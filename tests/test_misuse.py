"""Bad input gets an error of our tree that names the parameter and the way out."""

import copy
import os
import pickle
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from prefixstore import (
    ClosedError,
    InvalidParameterError,
    LocationError,
    MissingExtraError,
    MisuseError,
    PrefixStore,
    PrefixStoreError,
    demo,
)
from prefixstore.backends import open_backend
from prefixstore.config import load_config
from prefixstore.testing import models
from tests.support import ROOT, in_fork
from tests.support.models import load


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_bytes": 0}, "max_bytes=0 must be positive"),
        ({"max_bytes": "10 parsecs"}, "max_bytes='10 parsecs' is not a valid size"),
        ({"max_bytes": True}, "max_bytes=True is not a valid size"),
        ({"quota": {"salt": 5}}, "quota={'salt': 5} is not a valid size"),
        ({"max_bytes": 6_000_000, "quota": 7_000_000}, "raise max_bytes"),
        ({"max_bytes": 9, "far_max_bytes": 7, "quota": 8}, "quota=8 is larger than far_max_bytes=7; lower it"),
        ({"max_entries": 0}, "max_entries=0 must be an integer of at least 1"),
        ({"page_tokens": 12.5}, "page_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"codec": "rar"}, "codec='rar' is unknown; choose one of 'auto', 'raw', 'zstd'"),
        ({"policy": "random"}, "policy='random' is unknown; choose one of 'adaptive', 'lru'"),
        ({"namespace": ""}, "namespace='' must be a non-empty string"),
        ({"salt": 7}, "salt=7 must be a non-empty string"),
        ({"read_only": True}, "read_only=True"),
        ({"read_only": "false"}, "read_only='false' must be True or False"),
        ({"namespace": "\ud800"}, "not valid text"),
        ({"max_bytes": 2**62}, "at most 1024 PiB"),
        ({"max_bytes": "9" * 400 + "B"}, "at most 1024 PiB"),
        ({"max_bytes": 10**5000}, "cannot be shown"),
        ({"page_tokens": 2**40}, "at most"),
        ({"llm": "model.gguf"}, "llm must be a llama_cpp.Llama, not str"),
        ({"location": Mock()}, 'the location comes first: PrefixStore("kv", llm)'),
    ],
    ids=lambda value: ascii(value)[:60] if isinstance(value, str) else "",
)
def test_a_parameter_that_cannot_be_used_is_named(arguments, says):
    with pytest.raises(InvalidParameterError) as raised:
        PrefixStore(**({"location": "memory:"} | arguments))
    assert says in str(raised.value)
    assert isinstance(raised.value, (ValueError, PrefixStoreError))


def test_without_a_home_directory_only_the_default_location_is_refused(models, tmp_path, monkeypatch):
    for variable in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "PREFIXSTORE_LOCATION"):
        monkeypatch.delenv(variable, raising=False)
    # as of a user without an entry in the list of users
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(LocationError, match="no home directory; set HOME, or PREFIXSTORE_LOCATION"):
        PrefixStore(namespace="n")
    llm = load(models("llama"), n_ctx=512)
    with PrefixStore(tmp_path / "kv", llm) as store:
        assert store.namespace
    llm.close()


@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb", "kv.db", "kv.db-wal"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, file):
    location = tmp_path / "kv" if file.endswith("mdb") else f"sqlite:///{tmp_path / 'kv' / 'kv.db'}"
    PrefixStore(location, namespace="n").close()
    (tmp_path / "kv" / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "kv" / file)
    with pytest.raises(LocationError, match=f"{file} is not a regular file"):
        PrefixStore(location, namespace="n")


def test_a_closed_store_raises_closed_error(tmp_path):
    store = PrefixStore(tmp_path, namespace="n")
    store.close()
    store.close()
    for use in (store.flush, store.stats, store.check, store.clear, lambda: store.match([1]), lambda: store.pin([1])):
        with pytest.raises(ClosedError, match="open a new PrefixStore"):
            use()
    with pytest.raises(ClosedError), store:
        pass
    assert bool(store)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_not_copied_and_not_sent_to_another_process(tmp_path, duplicate):
    with PrefixStore(tmp_path / "kv") as store, pytest.raises(MisuseError, match="cannot be pickled or copied"):
        duplicate(store)


# what does not work without a package, the extra that has it, and our modules that may have imported it
MISSING = {
    "llama_cpp": (lambda: PrefixStore("memory:", llm=object()), "llama", "prefixstore.llama"),
    "llama_cpp, in the demo": (demo.run_demo, "llama", "-"),
    "gguf": (lambda: models.write_model(Path("m.gguf"), models.TINY["llama"]), "demo", "-"),
    "tokenizers": (lambda: models.write_model(Path("m.gguf"), models.TINY["llama"]), "demo", "-"),
    "tomllib": (lambda: load_config(ROOT / "mkdocs.yml"), "cli", "-"),
    "prometheus_client": (lambda: PrefixStore("memory:").metrics(), "server", "-"),
    "sqlalchemy": (lambda: open_backend("sqlite:///x.db", max_bytes=1), "sql", "prefixstore.backends.sql"),
    "alembic": (lambda: open_backend("sqlite:///x.db", max_bytes=1), "sql", "prefixstore.backends.sql"),
    "psycopg": (lambda: open_backend("postgresql://h/x", max_bytes=1), "postgres", "prefixstore.backends.sql"),
    "valkey": (lambda: open_backend("valkey://h", max_bytes=1), "valkey", "prefixstore.backends.valkey"),
    "obstore": (lambda: open_backend("s3://bucket/x", max_bytes=1), "s3", "prefixstore.backends.objects"),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_package_is_named_with_its_extra(package, tmp_path, monkeypatch):
    use, extra, ours = MISSING[package]
    package = package.partition(",")[0]
    monkeypatch.chdir(tmp_path)

    def without():
        models._vocabulary.cache_clear()
        for name in list(sys.modules):
            if name.split(".")[0] == package or name.startswith(ours):
                del sys.modules[name]
        sys.modules[package] = None
        with pytest.raises(MissingExtraError, match=rf'pip install "prefixstore\[{extra}\]"'):
            use()

    in_fork(without)
    assert list(tmp_path.iterdir()) == []


def test_every_error_is_in_the_documented_tree():
    from prefixstore import errors

    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert all(f" {name} " in errors.__doc__ or f"{name}\n" in errors.__doc__ for name in classes)
    assert issubclass(MisuseError, PrefixStoreError)


def test_a_missing_package_of_a_location_is_told_from_a_broken_one():
    missing = MissingExtraError.of_location(ModuleNotFoundError("No module named 'a.b'", name="a.b"), "sql")
    assert str(missing) == 'this location needs a, which is not installed; pip install "prefixstore[sql]"'
    broken = str(MissingExtraError.of_location(ImportError("no libpq"), "postgres"))
    assert broken.startswith("a package that this location needs cannot be imported: no libpq; pip install")
