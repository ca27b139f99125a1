"""Sessions that outlive their process: after a kill, in another process, and no longer than their pages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from prefixstore.engine.delete import Choice
from prefixstore.engine.keyspace import bookmarks_note
from prefixstore.maintenance.archive import Archive
from tests.sessions.conftest import KINDS, OPTIONS, SMALL, turn
from tests.support import python
from tests.support.engines import note_of
from tests.support.models import answer, forget, prompt

# a turn in each session, made durable, and their tokens printed; then more turns, until the process is killed
CONVERSE = """
import itertools, json, sys
from prefixstore import PrefixStore
from tests.support.engines import note_of
from tests.support.models import load, prompt
from tests.support.timeouts import disable_timeouts

def complete(name, tokens, n):
    with sessions.admit(name) as session:
        session.create_completion(tokens, max_tokens=n, temperature=0)
        return session.tokens.tolist()

disable_timeouts()
model, location, given = sys.argv[1:]
given = json.loads(given)
llm = load(model, **given["options"])
store = PrefixStore(location, llm, **given["store"])
sessions = store.sessions()
held = {name: complete(name, tokens, 5) for name, tokens in given["turns"].items()}
store.flush()
print(json.dumps(held), flush=True)
for i in itertools.count():
    complete(f"later {i % 5}", prompt(40, seed=i), 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_go_on_in_another_process_after_a_kill(kind, llama, open_store, models, tmp_path):
    arch, options = KINDS[kind]
    turns = {"alice": prompt(100), "bob": prompt(64, seed=1)}
    given = {"turns": turns, "options": SMALL | options, "store": OPTIONS}
    with python(CONVERSE, models(arch), tmp_path / "kv", json.dumps(given)) as process:
        held = json.loads(process.stdout.readline())
        process.kill()
    llm, alone = (llama(arch, **SMALL, **options) for _ in range(2))
    store = open_store(llm)
    sessions = store.sessions()
    assert {"alice", "bob"} <= set(sessions.names())
    for i, (name, tokens) in enumerate(held.items()):
        with sessions.admit(name) as session:
            assert session.tokens.tolist() == tokens
            assert session.n_live + session.n_restored == len(tokens)
        new = tokens + prompt(9, seed=9 + i)
        assert turn(sessions, name, new).text == answer(alone, new, 6)
    assert store.check() == []


def test_without_a_write_thread_they_are_kept_as_well(llm, open_store):
    store = open_store(llm, write_behind=False)
    held = turn(store.sessions(), "alice", prompt(50)).tokens
    store.close()
    forget(llm)
    assert turn(open_store(llm).sessions(), "alice", [*held, 5])[:3] == ("store", 0, len(held))


def test_a_discarded_session_is_not_resumed(llm, open_store):
    store = open_store(llm)
    sessions = store.sessions()
    turn(sessions, "alice", prompt(50))
    turn(sessions, "bob", prompt(50, seed=1))
    with pytest.raises(ZeroDivisionError), sessions.admit("alice"):
        raise ZeroDivisionError
    store.close()
    assert open_store(llm).sessions().names() == ["bob"]


# -- they go with their pages -----------------------------------------------------------------------------------------


@pytest.fixture
def left(llm, open_store):
    """A closed store with three sessions, two of which share a beginning; what they hold."""
    store = open_store(llm, salt="tenant")
    sessions = store.sessions()
    shared = prompt(40)
    held = {
        "alice": turn(sessions, "alice", shared + prompt(30, seed=1)).tokens,
        "bob": turn(sessions, "bob", shared + prompt(30, seed=2)).tokens,
        "carol": turn(sessions, "carol", prompt(70, seed=3)).tokens,
    }
    store.close()
    forget(llm)
    return held


@pytest.mark.parametrize(
    ("purged", "stay"),
    [
        ({"everything": True}, []),
        ({"salt": "tenant"}, []),
        ({"older_than": 1e-9}, []),
        ({"tokens": "alice"}, ["bob", "carol"]),
        ({"tokens": "shared"}, ["carol"]),
        ({"salt": "another"}, ["alice", "bob", "carol"]),
    ],
)
def test_a_purge_removes_the_names_of_what_it_deletes(purged, stay, left, llm, tmp_path, open_store):
    whole = {"alice": left["alice"], "shared": prompt(40)}
    if "tokens" in purged:
        purged = {"tokens": whole[purged["tokens"]]}
    with Archive(tmp_path / "kv") as archive:
        archive.purge(**purged)
    store = open_store(llm, salt="tenant")
    note = note_of(store, bookmarks_note(store.namespace.key))
    for name in left:
        assert (name in store.sessions().names()) == (name in stay)
    if not stay:
        assert note is None
    # nothing of the tokens is left in the note either
    assert sorted(store.engine.bookmarks.read(store.namespace.key)) == stay


@pytest.mark.parametrize("salt", ["tenant", "another"])
def test_what_another_process_purges_is_gone_from_a_table_in_use_too(llm, tmp_path, open_store, salt):
    store = open_store(llm, salt="tenant")
    sessions = store.sessions()
    for seed, name in enumerate(["alice", "bob"]):
        turn(sessions, name, prompt(70, seed=seed))
    store.flush()
    with Archive(tmp_path / "kv") as archive:
        archive.purge(salt=salt)
    names = sessions.names()
    with sessions.admit("alice") as session:
        held = len(session.tokens)
    if salt == "tenant":
        assert (names, held) == ([], 0)
    else:
        assert (names, held) == (["alice", "bob"], 75)
    # what is said afterwards is stored, and found, as ever
    turn(sessions, "alice", prompt(80, seed=9))
    store.flush()
    assert "alice" in sessions.names()


def test_clear_removes_them(left, llm, open_store):
    store = open_store(llm, salt="tenant")
    sessions = store.sessions()
    turn(sessions, "dave", prompt(50, seed=4))
    assert len(sessions.names()) == 4
    store.clear()
    assert sessions.names() == []
    assert note_of(store, bookmarks_note(store.namespace.key)) is None


def test_one_whose_pages_were_evicted_is_not_resumed(left, llm, open_store):
    store = open_store(llm, salt="tenant")
    store.engine.evictor.evict(store.stats().bytes_used // 2)
    sessions = store.sessions()
    assert 0 < len(sessions.names()) < 3
    for name in left:
        with sessions.admit(name) as session:
            assert (session.source == "store") == (len(session.tokens) > 0)


def test_a_purge_of_nothing_deletes_no_session_whose_pages_were_evicted_in_part(llm, open_store):
    store = open_store(llm)
    sessions = store.sessions()
    held = [turn(sessions, name, prompt(100, seed=i)).tokens for i, name in enumerate(("alice", "bob"))]
    store.flush()
    while len(store.engine.bookmarks.whole(store.namespace.key)) == 2:
        assert store.evict(store.cache_size - 1).pages
    assert store.engine.deleter.delete(Choice(before=1)).pages == 0
    for name, tokens in zip(("alice", "bob"), held, strict=True):
        with sessions.admit(name) as session:
            assert session.tokens.tolist() == tokens


def test_forged_bookmarks_give_no_wrong_tokens(left, llm, open_store):
    """A bookmark tells where a sequence ends; the tokens are those of the pages, or none."""
    store = open_store(llm, salt="tenant")
    engine, namespace = store.engine, store.namespace.key
    known = engine.bookmarks.read(namespace)
    forged = {
        "rest": replace(known["alice"], rest=b"\x01\0\0\0" * 3, n_tokens=known["alice"].start + 3),
        "shorter": replace(known["alice"], n_tokens=known["alice"].n_tokens - 16),
        "page": replace(known["alice"], page=b"x" * 32),
        "first": replace(known["alice"], page=namespace),
        "nothing": replace(known["alice"], page=namespace, rest=b"", n_tokens=0),
    }
    for name, bookmark in forged.items():
        engine.write_queue.set_bookmark(namespace, name, bookmark)
    assert set(store.sessions().names()) == {"alice", "bob", "carol"}
    store.flush()
    assert set(engine.bookmarks.read(namespace)) == {"alice", "bob", "carol"}


def test_what_another_process_has_left_later_counts_and_after_a_discard(llm, llama, open_store):
    other = llama(**SMALL)
    one, two = open_store(llm), open_store(other)
    here, there = one.sessions(), two.sessions()
    turn(here, "alice", prompt(40))
    one.flush()
    later = turn(there, "alice", prompt(70, seed=1)).tokens
    two.flush()
    with here.admit("alice") as session:
        assert session.tokens.tolist() == later
    with pytest.raises(ZeroDivisionError), here.admit("alice"):
        raise ZeroDivisionError
    # not written yet, when the other process leaves it once more
    later = turn(there, "alice", prompt(80, seed=2)).tokens
    two.flush()
    one.flush()
    assert "alice" in here.names()
    with here.admit("alice") as session:
        assert (session.tokens.tolist(), session.generation) == (later, 1)
