"""Whatever a parameter is given, an error is one of ours."""

import contextlib
import inspect
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixstore import PrefixStore, PrefixStoreError
from prefixstore.config import load_config
from prefixstore.maintenance.archive import Archive
from prefixstore.units import parse_bytes, parse_seconds
from tests.support.places import fill, space

BOUNDED = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))

NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=2**31),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**400, 10**5000, -(10**5000), 0, -1]),
    st.floats(),
    st.booleans(),
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=12),
    st.sampled_from(
        ["\ud800", "a\udcff", "\0", "", " ", "9" * 400, f"{'9' * 400}TiB", "1" * 5000, "٣d", "1e9", "~nobody-x/y"]
    ),
    st.from_regex(r"[0-9.]{1,20} ?[kKmMgGtTiIbBdhsw]{0,3}", fullmatch=True),
)
OBJECTS = st.one_of(
    st.none(),
    NUMBERS,
    TEXTS,
    st.binary(max_size=8),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(TEXTS, NUMBERS, max_size=2),
    st.sampled_from([timedelta.max, timedelta.min, np.int64(7), np.float32("nan"), np.array([1, 2]), object, 1j]),
)


@contextlib.contextmanager
def ours():
    with contextlib.suppress(PrefixStoreError):
        yield


# what a key names is read, or run
PARAMETERS = sorted(inspect.signature(PrefixStore).parameters.keys() - {"location", "llm", "key"})


@BOUNDED
@given(st.sampled_from(PARAMETERS), OBJECTS)
def test_of_a_store(name, value):
    with ours(), PrefixStore("memory:", **{"namespace": "n", name: value}) as store:
        store.match([1, 2, 3])
        store.stats()


@BOUNDED
@given(OBJECTS)
def test_of_the_methods_of_a_store(value):
    with PrefixStore("memory:", namespace="n") as store:
        for use in (store.match, store.pin):
            with ours():
                use(value)


@BOUNDED
@given(st.sampled_from(["{}", "lmdb://{}", "sqlite:///{}", "memory:{}", "{}:x"]), TEXTS)
def test_of_a_location(tmp_path, form, text):
    # never outside the directory of the test
    location = form.format(f"{tmp_path}/none/{text}" if "{}" in form[-2:] and form != "memory:{}" else text)
    with ours():
        Archive(location, read_only=True).close()


@BOUNDED
@given(OBJECTS, st.sampled_from(["namespace", "salt", "older_than", "tokens", "page"]))
def test_of_an_archive(value, name):
    with Archive("memory:", create=True) as archive:
        fill(archive.backend, space("mine"), [[1, 2, 3, 4]])
        with ours():
            archive.purge(**{name: value})
        for use in (archive.evict, archive.check, archive.repair, archive.find, archive.namespace):
            with ours():
                use(value)


@BOUNDED
@given(OBJECTS, TEXTS)
def test_of_sizes_and_durations(value, text):
    for one in (value, text):
        for parse in (parse_bytes, parse_seconds):
            with ours():
                assert 0 < parse(one, "x") < 2**63


@pytest.mark.parametrize(
    "text",
    ["\ud800", "[" * 100_000, "a = " + "[" * 100_000, "[model]\nn_ctx = " + "9" * 5000, "\0", "[store]\nlocation = 7"],
)
def test_of_a_config_file(tmp_path, text):
    (tmp_path / "x.toml").write_text(text, "utf-8", errors="surrogatepass")
    with ours():
        load_config(tmp_path / "x.toml").open_store(None)
