"""Prompts of memory that cannot step back, which `prefixstore serve` has computed and stored in steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixstore.server import prefill
from prefixstore.server.prefill import MIN_MISSING, MOST_STOPS, most_stops
from prefixstore.server.rates import Rates, RequestUsage
from tests.support.llama_server import Running
from tests.support.models import prompt as numbers
from tests.support.served import TEXT, Serve
from tests.support.timeouts import usual_limits

Models = Callable[..., Path]
Started = Callable[..., Running]
SHARED = numbers(1000)


def computed(answer: dict[str, Any]) -> int:
    return int(answer["timings"]["prompt_n"])


# -- how often it is worth it ------------------------------------------------------------------------------------------


def test_nothing_is_known_of_a_new_server_so_a_stop_is_tried():
    assert most_stops(Rates(), MIN_MISSING, 4000) == MOST_STOPS
    assert most_stops(Rates(), MIN_MISSING - 1, 4000) == 0


@pytest.mark.parametrize(("copy_seconds", "stops"), [(0.001, MOST_STOPS), (0.05, 2), (0.1, 1), (0.2, 0)])
def test_stops_take_at_most_three_percent_of_computing_a_prompt(
    copy_seconds: float, stops: int, monkeypatch: pytest.MonkeyPatch
):
    for name, value in usual_limits(prefill):
        monkeypatch.setattr(prefill, name, value)
    rates = Rates()
    rates.computed(1000, 1.0)
    rates.saved(4000, 1 << 20, copy_seconds)
    assert most_stops(rates, 4000, 4000) == stops
    # twice as many tokens take at most twice as long to copy, and half of them no longer than all
    assert most_stops(rates, 2000, 2000) <= stops
    assert most_stops(rates, 8000, 8000) == stops


def test_what_was_computed_ahead_of_a_request_was_not_cached():
    assert RequestUsage(1408, 1, 16).after(1408) == RequestUsage(0, 1409, 16)
    assert RequestUsage(1408, 1, 16).after(174) == RequestUsage(1234, 175, 16)
    assert RequestUsage(0, 1409, 16).after(1300) == RequestUsage(0, 2709, 16), "the slot was emptied in between"


# -- with a server -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_a_document_ends_is_seen_in_the_text(serve: Serve, models: Models, llama_server: Started):
    alone = llama_server(models("lfm2"))
    document, questions = TEXT[:3000] + "\n\n", (TEXT[8000:8400], TEXT[9000:9500])
    served = serve(model=models("lfm2"))
    served.complete(document + questions[0])
    assert served.stop() == 0
    served = serve(model=models("lfm2"))
    answer = served.complete(document + questions[1])
    assert answer["content"] == alone.cold(document + questions[1])
    n_document = len(served.post("/tokenize", json={"content": document, "add_special": True}).json()["tokens"])
    # the answer counts what was computed in steps as cached
    n_restored = int(served.metric("prefixstore_request_restored_tokens_total"))
    assert n_document - n_restored in range(-8, 65)


@pytest.mark.slow
def test_short_prompts_and_memory_that_can_be_cut_are_computed_at_once(serve: Serve, models: Models):
    for model, tokens in ((models("lfm2"), numbers(MIN_MISSING - 1)), (models("llama"), SHARED)):
        served = serve(model=model)
        assert computed(served.complete(tokens)) == len(tokens)
        assert served.stop() == 0


@pytest.mark.slow
def test_a_client_sees_the_errors_of_the_server(serve: Serve, models: Models):
    served = serve("-c", "2048", "-np", "1", model=models("lfm2"))
    for body in ({"prompt": numbers(2100)}, {"prompt": SHARED, "grammar": "root ::= ("}):
        answer = served.post("/completion", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] in ("exceed_context_size_error", "invalid_request_error")
    # what was computed before the second was refused is of use
    assert computed(served.complete(SHARED)) == 1


@pytest.mark.slow
def test_a_client_that_goes_away_meanwhile_stops_the_server(serve: Serve, models: Models, llama_server: Started):
    tokens = numbers(16000)
    served = serve("-c", "16384", "-np", "1", model=models("lfm2"))
    with suppress(httpx.TimeoutException):
        httpx.post(f"{served.url}/completion", json={"prompt": tokens, "n_predict": 1}, timeout=0.5, trust_env=False)
        pytest.fail("the prompt was computed before its client went away")
    served.until(lambda status: not any(slot["in_use"] for slot in status["slots"]))
    answer = served.complete(SHARED)
    assert answer["content"] == llama_server(models("lfm2")).cold(SHARED)
    assert served.status()["failures"] == {}
