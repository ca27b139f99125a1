"""A local location in front of a shared one that is killed, forgets, hangs, cuts its answers or is far away."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from contextlib import closing, suppress

import pytest

from prefixstore import PrefixStore
from prefixstore.engine import breaker
from tests.support import PATIENCE
from tests.support.models import TORTURE, answer, attached, evaluated, forget, load, prompt
from tests.support.places import place
from tests.support.throttle import Throttled
from tests.support.timeouts import wait_for
from tests.support.valkey import private_valkey
from tests.support.warming import job_command, shared_prompts, unique_tokens, write_jsonl
from tests.support.worker import ROOT

TOKENS = prompt(1000)
HOSTS = 3


@pytest.fixture(scope="module")
def expected(models):
    """A Llama, and what it answers without a store."""
    llm, answers = load(models("llama")), {}

    def of(tokens):
        key = tuple(tokens)
        if key not in answers:
            forget(llm)
            llm.set_cache(None)
            answers[key] = answer(llm, tokens, 6)
        return answers[key]

    return llm, of


def conversation(seed, n=6):
    """Prompts of which each continues the one before it or one before that."""
    rng = random.Random(seed)
    prompts = [prompt(rng.randint(200, 600), seed)]
    while len(prompts) < n:
        longer = [*rng.choice(prompts), *prompt(rng.randint(20, 300), rng.randint(0, 9))]
        prompts.append(longer[:3000])
    return prompts


def test_a_shared_server_that_is_killed_forgets_and_cuts_its_answers(expected, tmp_path, monkeypatch):
    monkeypatch.setattr(breaker, "OPEN_FACTOR", 0.0)
    llm, of = expected
    rng = random.Random(5)
    prompts = conversation(5)
    answers = [of(tokens) for tokens in prompts]
    with private_valkey() as server, closing(Throttled(("127.0.0.1", server.port))) as link:
        url = f"valkey://127.0.0.1:{link.port}/0"
        is_up = True
        for number in range(3 * TORTURE):
            with PrefixStore([f"lmdb://{tmp_path / str(number)}", url], max_delay=None) as store:
                attached(store, llm)
                for _ in range(6):
                    if rng.random() < 0.3:
                        # what it had is gone
                        (server.kill if is_up else server.start)()
                        is_up = not is_up
                    link.cut_after = rng.choice([None, None, 50_000, 300_000])
                    forget(llm)
                    i = rng.randrange(len(prompts))
                    assert answer(llm, prompts[i], 6) == answers[i]
                link.cut_after = None
                if not is_up:
                    server.start()
                    is_up = True
                wait_for(lambda: not store.engine.far.is_failing, "the server is used again")
                with suppress(Exception):
                    store.flush()
                forget(llm)
                assert answer(llm, prompts[0], 6) == answers[0]
                llm.set_cache(None)
                assert [one for one in store.check() if one.rule != "index"] == []


def test_a_server_that_is_stopped_holds_up_nobody(expected, tmp_path, monkeypatch):
    llm, of = expected
    longer = [*TOKENS, *prompt(200, 3)]
    first, second = of(TOKENS), of(longer)
    with private_valkey() as server:
        with PrefixStore([f"lmdb://{tmp_path / 'kv'}", server.tcp_url], max_delay=0.2) as store:
            attached(store, llm)
            forget(llm)
            answer(llm, TOKENS, 1)
            store.flush()
            server.pause()
            for _ in range(5):
                # the shared location may have more of it
                forget(llm)
                assert answer(llm, longer, 6) == second
                forget(llm)
                assert answer(llm, TOKENS, 6) == first
            near, far = store.stats().tiers
            assert far.late >= 1
            assert near.pages >= 4
            server.go_on()
        llm.set_cache(None)


@pytest.mark.parametrize("scheme", ["valkey", "s3"])
def test_a_link_that_is_slower_than_computing(expected, tmp_path, request, scheme, monkeypatch):
    """At 1 MB/s and 20 ms away: the answers are the same, and what came late is there the next time."""
    llm, of = expected
    first = of(TOKENS)
    url = place(scheme, tmp_path, request)
    server = request.getfixturevalue("valkey_server" if scheme == "valkey" else "seaweedfs")
    if scheme == "valkey":
        url = server.tcp_url + url.removeprefix(server.url)
    with PrefixStore([f"lmdb://{tmp_path / 'one'}", url], namespace="x", max_delay=None) as store:
        attached(store, llm)
        forget(llm)
        answer(llm, TOKENS, 1)
    with closing(Throttled(("127.0.0.1", server.port), bytes_per_second=1e6, seconds=0.01)) as link:
        slow = url.replace(f":{server.port}", f":{link.port}")
        with PrefixStore([f"lmdb://{tmp_path / 'two'}", slow], namespace="x", max_delay=0.5) as store:
            attached(store, llm)
            from prefixstore.engine import compute_rate

            monkeypatch.setattr(compute_rate, "MAX_SHARE", 0.05)

            def is_near():
                """Whether all of it came in time, after another attempt."""
                forget(llm)
                assert answer(llm, TOKENS, 6) == first
                store.drain()
                forget(llm)
                return evaluated(store, lambda: answer(llm, TOKENS, 1)) == 1

            wait_for(is_near, "what came late")
            llm.set_cache(None)
            assert store.check() == []


# -- three hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["valkey", "s3", "postgresql"])
def test_three_hosts_that_warm_one_location_divide_the_work(models, tmp_path, request, scheme):
    far, prompts = place(scheme, tmp_path, request), shared_prompts(30)
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"tokens": tokens} for tokens in prompts])
    jobs = [
        subprocess.Popen(
            job_command(
                model=str(models("llama")),
                location=[f"lmdb://{tmp_path / str(host)}", far],
                prompts=str(file),
                pause=0.01,
                lease_seconds=120,
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(HOSTS)
    ]
    ends = []
    for job in jobs:
        lines = job.communicate(timeout=5 * PATIENCE)[0].splitlines()
        assert job.returncode == 0
        ends.append(json.loads(lines[-1]))
    assert all(end["unstored"] == [] for end in ends)
    assert sum(end["evaluated"] for end in ends) <= 1.05 * unique_tokens(prompts)
    llm = load(models("llama"))
    with PrefixStore([f"lmdb://{tmp_path / 'new'}", far], llm, max_delay=None) as store:
        assert all(store.match(tokens).n_tokens == len(tokens) for tokens in prompts)
        assert store.check() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_a_restore_from_two_locations(expected, tmp_path, new_valkey):
    llm, of = expected
    rng = random.Random(9)
    prompts = conversation(9)
    answers = [of(tokens) for tokens in prompts]
    far = new_valkey(tcp=True)
    with PrefixStore([f"lmdb://{tmp_path / 'one'}", far], max_delay=None) as store:
        attached(store, llm)
        for tokens in prompts:
            answer(llm, tokens, 1)
        llm.set_cache(None)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    n_interrupted = 0
    try:
        with PrefixStore([f"lmdb://{tmp_path / 'two'}", far], max_bytes="1MiB", max_delay=None) as store:
            attached(store, llm)
            for _ in range(60 * TORTURE):
                i = rng.randrange(len(prompts))
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
                        forget(llm)
                        answer(llm, prompts[i], 6)
                    finally:
                        # it may come here, too
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    n_interrupted += 1
            for tokens, expected_answer in zip(prompts, answers, strict=True):
                forget(llm)
                assert answer(llm, tokens, 6) == expected_answer
            store.flush()
            assert store.engine.far.queued_bytes == 0
            assert store.stats().queued_bytes == 0
            llm.set_cache(None)
            assert store.check() == []
    finally:
        signal.signal(signal.SIGALRM, before)
    assert n_interrupted > 5
