"""`prefixstore serve` and rows that are not those of a slot's tokens alone: no request that is not theirs gets them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.llama_server import Running
from tests.support.served import TEXT, Serve, Served, cached, own_answers, prompt

# A field that this llama-server does not know, as a newer one may.
UNKNOWN = {"steering": 1}


def _passed(served: Served, text: Any, **options: Any) -> dict[str, Any]:
    return served.complete(text, **UNKNOWN, **options)


@pytest.mark.slow
def test_a_request_with_an_unknown_field_goes_past_the_store_and_keeps_its_slot(serve: Serve, alone: Running):
    served = serve()
    first = _passed(served, prompt(1))
    again = _passed(served, prompt(1))
    assert (cached(first), cached(again) > 200) == (0, True), "as with the server alone"
    assert served.counts(2, "prefixstore_requests_passed_total", endpoint="/completion", reason="unknown_field")
    # nobody else is given what it has left, in this slot or in that which the client names
    for options in ({}, {"id_slot": 0}, {"id_slot": 1}):
        answer = served.complete(prompt(1) if not options else prompt(1) + " " + str(options), **options)
        assert cached(answer) in (0, *range(200, 2000))
    assert served.text().count("requests with the field steering bypass the store") == 1
    assert served.stop() == 0
    assert served.text().count("steering") == 2, "the name of the field, and no more of the request"


@pytest.mark.slow
@pytest.mark.parametrize("slot", [{}, {"id_slot": 0}])
@pytest.mark.parametrize("fields", [UNKNOWN, {"lora": [{"id": 0, "scale": 0.5}]}])
def test_the_rows_of_a_request_that_may_alter_them_are_neither_used_nor_stored(
    fields: dict[str, Any], slot: dict[str, int], serve: Serve, alone: Running
):
    served = serve("-np", "1")
    served.complete(prompt(2), **fields, **slot)
    served.until(lambda status: bool(status["slots"][0]["to_be_erased"]))
    served.saved()
    assert served.status()["store"]["pages_captured"] == 0
    answer = served.complete(prompt(2), **slot)
    assert cached(answer) == 0
    assert answer["content"] in own_answers(alone, prompt(2))
    assert cached(served.complete(prompt(2), **slot)) > 200


@pytest.mark.slow
def test_infill_goes_on_in_the_slot_that_has_it_as_with_the_server_alone(serve: Serve):
    marks = {"pre": 300, "suf": 301, "mid": 302}
    options = [("--override-kv", f"tokenizer.ggml.fim_{name}_token_id=int:{token}") for name, token in marks.items()]
    served = serve(*(part for option in options for part in option))
    found = []
    for i, more in ((1, ""), (2, ""), (2, " and more"), (1, " and more")):
        request = {"input_prefix": prompt(i) + more, "input_suffix": "end", "n_predict": 1, "temperature": 0}
        found.append(cached(served.post("/infill", json=request).json()))
    assert max(found[:2]) < 50
    assert min(found[2:]) > 200


@pytest.mark.slow
def test_an_unknown_field_where_no_slot_can_be_named_empties_all(serve: Serve):
    served = serve()
    for i in (4, 5):
        served.complete(prompt(i))
    served.saved()
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert served.post("/v1/messages", json=message | UNKNOWN).status_code == 200
    assert served.counts(1, "prefixstore_requests_passed_total", endpoint="/v1/messages", reason="unknown_field")
    assert all(slot["to_be_erased"] for slot in served.status()["slots"])
    # the server may choose any slot for this one, so none may hold such rows
    assert served.post("/v1/messages", json=message).status_code == 200
    assert not any(slot["to_be_erased"] for slot in served.status()["slots"])
    assert cached(served.complete(prompt(4))) > 200, "from the store"


# -- rows that were moved ----------------------------------------------------------------------------------------------

MOVED = {"n_cache_reuse": 8}


def _whole_and_end(running: Running) -> tuple[list[int], list[int]]:
    """Tokens of a text, and what is left when its beginning is cut off: the same tokens at other positions."""
    answer = httpx.post(f"{running.url}/tokenize", json={"content": TEXT[:3000]}, trust_env=False)
    tokens = list(answer.json()["tokens"])
    return tokens, tokens[200:]


def _own(running: Running, tokens: list[int]) -> set[str]:
    return {running.cold(tokens), running.complete(tokens)["content"]}


def _moves_rows(running: Running) -> bool:
    whole, end = _whole_and_end(running)
    running.client.erase(0)
    running.complete(whole)
    return cached(running.complete(end, **MOVED)) > 100


@pytest.mark.slow
def test_no_request_moves_rows(serve: Serve, alone: Running):
    assert _moves_rows(alone)
    served = serve("-np", "2", "-c", "8192")
    whole, end = _whole_and_end(alone)
    own = _own(alone, end)
    for options in ({}, {"cache_prompt": False}, {"n_cmpl": 2}, {"prompt": [end, "Hello"]}, {"id_slot": 0}):
        for slot in (0, 1):
            served.complete([slot, *whole[1:]], 1, id_slot=slot)
        body = {"prompt": end, "n_predict": 12, "temperature": 0} | MOVED | options
        answer = served.post("/completion", json=body).json()
        for one in answer if isinstance(answer, list) else [answer]:
            if one["tokens_evaluated"] > 100:
                assert cached(one) in (0, len(end) - 1)
                assert one["content"] in own


# -- slots that cannot be emptied --------------------------------------------------------------------------------------


def _stuck(tmp_path: Path, *slots: int) -> dict[str, str]:
    """An environment in which these slots are not emptied."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "from prefixstore.errors import ServerRefusedError\n"
        "from prefixstore.server.client import LlamaServer\n"
        "erase = LlamaServer.erase\n"
        "def erase_most(self, slot):\n"
        f"    if slot in {slots!r}:\n"
        "        raise ServerRefusedError('it is stuck')\n"
        "    return erase(self, slot)\n"
        "LlamaServer.erase = erase_most\n"
    )
    return {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


@pytest.mark.slow
def test_a_tenant_is_answered_if_the_slot_of_another_cannot_be_emptied_and_finds_nothing_in_it(
    serve: Serve, alone: Running, tmp_path: Path
):
    served = serve("-np", "1", options=("--salt-from", "header:X-Tenant"), environment=_stuck(tmp_path, 0))
    for tenant in ("ann", "bob", "ann"):
        answer = served.complete(prompt(7), headers={"X-Tenant": tenant})
        assert cached(answer) == 0
        assert answer["content"] in own_answers(alone, prompt(7))
    several = {"prompt": [prompt(7), "Hello"], "n_predict": 2}
    answer = served.post("/completion", json=several, headers={"X-Tenant": "bob"})
    assert [cached(one) for one in answer.json()] == [0, 0]
    # of this one it cannot be said that nothing is to be used
    message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert served.post("/v1/messages", json=message, headers={"X-Tenant": "ann"}).status_code == 503
