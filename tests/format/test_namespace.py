"""What must be equal for a state to be valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixstore.format.keys import KEY_BYTES
from prefixstore.format.namespace import Namespace

scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5)
settings = st.dictionaries(st.text(max_size=5), scalars, max_size=5)


@pytest.mark.slow
@given(settings)
def test_a_namespace_can_be_read_from_its_canonical_form(values):
    namespace = Namespace(values)
    again = Namespace.parse(namespace.canonical)
    assert again.canonical == namespace.canonical
    assert again.key == namespace.key
    assert len(namespace.key) == KEY_BYTES
    assert again.differences(namespace) == {}


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, "1"), (1, 1.0), (0.0, -0.0), (None, "null"), ("", None)])
def test_values_that_python_considers_equal_are_kept_apart(one, other):
    assert Namespace({"a": one}).key != Namespace({"a": other}).key


def test_differences_are_named():
    here, there = Namespace({"a": 1, "b": 2, "c": 3}), Namespace({"a": 1, "b": 5, "d": None})
    assert here.differences(there) == {"b": (2, 5), "c": (3, None)}
    assert here.differences(here) == {}
