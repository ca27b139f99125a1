"""The lock on a handle: shared by those that use it, exclusive to the one that replaces it."""

import signal
import threading
from contextlib import contextmanager, suppress

import pytest

from prefixstore.backends.forks import HandleLock
from prefixstore.errors import MisuseError
from tests.support import PATIENCE, in_thread


def is_free(handle):
    """Whether a thread can be alone."""

    def hold_alone():
        with handle.exclusive():
            pass

    thread = in_thread(hold_alone)
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_an_error_or_an_interrupt_in_a_block_or_while_waiting_leaves_nothing_held():
    handle = HandleLock()
    for opened in (handle.shared, handle.exclusive):
        with suppress(KeyboardInterrupt), opened():
            raise KeyboardInterrupt
    for theirs, mine in ((handle.exclusive, handle.shared), (handle.shared, handle.exclusive)):
        thread, leave = wait_at(theirs)
        with interrupted_soon(), pytest.raises(KeyboardInterrupt), mine():
            raise AssertionError("it did not wait")
        assert not handle.is_held
        leave.set()
        thread.join(PATIENCE)
    assert is_free(handle)


@contextmanager
def interrupted_soon():
    """A block that Ctrl-C interrupts after a while."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_at(ready):
    """A thread that is inside until it is told to leave."""
    inside, leave = threading.Event(), threading.Event()

    def use():
        with ready():
            inside.set()
            assert leave.wait(PATIENCE)

    thread = in_thread(use)
    assert inside.wait(PATIENCE)
    return thread, leave


def test_a_thread_that_uses_the_handle_cannot_wait_for_itself():
    handle = HandleLock()
    with handle.shared(), pytest.raises(MisuseError, match="leave it first"):
        handle.enter_alone("me")
    assert is_free(handle)
