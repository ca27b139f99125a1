"""A local location in front of a shared one that is killed, forgets, and cuts its answers."""

from __future__ import annotations

import random
from contextlib import closing, suppress

from prefixstore import PrefixStore
from prefixstore.engine import breaker
from tests.support.models import answer, attached, forget, load, prompt, volume
from tests.support.proxy import Line
from tests.support.timeouts import wait_for
from tests.support.valkey import private_valkey


def conversation(seed, n=6):
    """Prompts of which each continues the one before it or one before that."""
    rng = random.Random(seed)
    prompts = [prompt(rng.randint(200, 600), seed)]
    while len(prompts) < n:
        longer = [*rng.choice(prompts), *prompt(rng.randint(20, 300), rng.randint(0, 9))]
        prompts.append(longer[:3000])
    return prompts


def test_a_shared_server_that_is_killed_forgets_and_cuts_its_answers(models, tmp_path, monkeypatch):
    monkeypatch.setattr(breaker, "OPEN_FACTOR", 0.0)
    llm, rng = load(models("llama")), random.Random(5)
    prompts, answers = conversation(5), []
    for tokens in prompts:
        forget(llm)
        answers.append(answer(llm, tokens, 6))
    with private_valkey() as server, closing(Line(("127.0.0.1", server.port))) as link:
        url = f"valkey://127.0.0.1:{link.port}/0"
        is_up = True
        for number in range(volume(3)):
            with PrefixStore([f"lmdb://{tmp_path / str(number)}", url], max_delay=None) as store:
                attached(store, llm)
                for _ in range(6):
                    if rng.random() < 0.3:
                        # what it had is gone
                        (server.kill if is_up else server.start)()
                        is_up = not is_up
                    link.left = rng.choice([None, None, 50_000, 300_000])
                    forget(llm)
                    i = rng.randrange(len(prompts))
                    assert answer(llm, prompts[i], 6) == answers[i]
                link.left = None
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
