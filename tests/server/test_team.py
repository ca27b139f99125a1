"""`prefixstore serve` for a team: tenants, their quotas and their deletion, and a store that cannot be opened."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixstore import PrefixStore
from prefixstore.cli import main
from prefixstore.format.namespace import parted
from prefixstore.maintenance.archive import Archive
from prefixstore.server.tenants import within
from tests.support.llama_server import Running
from tests.support.served import Serve, Served, cached, own_answers, prompt

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


def of_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["tenants", *map(str, arguments), "--json"]) == 0
    return list(json.loads(capsys.readouterr().out))


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_a_part_of_a_tenant_is_found_in_its_owner_only_where_no_client_can_write_it():
    tenant, part = parted(within("x-user:al", "her project"))
    assert (tenant, part is not None and part.startswith("cache-salt-")) == ("x-user:al", True)
    assert part != parted(within("x-user:al", "another"))[1]
    for name in ("x-user:al", f"x-user:a/{part}:b", f"x-user:/{part}:"):
        assert parted(name) == (name, None)


@pytest.mark.slow
def test_alice_is_deleted_by_her_key(serve: Serve, tmp_path: Path, capsys, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text(f"{BOB}\n{ALICE}\n")
    served = serve(
        *("--api-key-file", str(keys), "--metrics"),
        options=("--salt-from", "api-key", "--admin-key", "sk-admin"),
        headers=of_key("sk-admin"),
    )
    for i, key, fields in ((1, ALICE, {}), (2, ALICE, {"cache_salt": "her project"}), (1, BOB, {})):
        served.complete(prompt(i), headers=of_key(key), **fields)
        # what is computed soon is saved in idle time only
        served.saved()
    # the server's own, which does not know the administrator's key
    assert served.metric("llamacpp:prompt_tokens_total") > 0
    assert served.stop() == 0
    store = tmp_path / "store"
    everyone = listed(capsys, store, "--api-key-file", keys)
    assert sorted(one["line"] for one in everyone) == [1, 2]
    assert min(one["pages"] for one in everyone) > 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ALICE.encode())))
    for one in listed(capsys, store, "--api-key-file", "-"):
        assert main(["purge", str(store), "--salt", one["tenant"]]) == 0
    (left,) = listed(capsys, store)
    assert left["tenant"] in {one["tenant"] for one in everyone if one["line"] == 1}
    assert main(["tenants", str(store), "--api-key-file", str(keys)]) == 0
    assert left["tenant"] in capsys.readouterr().out


@pytest.mark.slow
def test_tenants_are_listed_as_their_header_names_them(serve: Serve, tmp_path: Path, capsys):
    served = serve(options=("--salt-from", "header:X-Tenant", "--admin-key", "sk-admin"), headers=of_key("sk-admin"))
    names = ["società", "societÅ", "alice 内"]
    for i, name in enumerate(names):
        served.complete(prompt(i), headers={"X-Tenant": name.encode()})
        served.saved()
    served.complete(prompt(7), headers={"X-Tenant": b"societ\xe0"})
    served.saved()
    assert served.stop() == 0
    found = {one["tenant"] for one in listed(capsys, tmp_path / "store")}
    assert found == {*(f"x-tenant:{name}" for name in names), "x-tenant/latin-1:società"}


@pytest.mark.slow
def test_requests_share_with_those_of_the_same_tenant_and_cache_salt_only(serve: Serve, alone: Running):
    served = serve(options=("--salt-from", "header:X-Tenant", "--admin-key", "sk-admin"), headers=of_key("sk-admin"))
    seen, right = {}, own_answers(alone, prompt(3))
    for tenant in ("ann", "bob"):
        for salt in (None, "one", "two", "one"):
            fields = {} if salt is None else {"cache_salt": salt}
            answer = served.complete(prompt(3), headers={"X-Tenant": tenant}, **fields)
            assert answer["content"] in right
            seen[tenant, salt] = cached(answer)
            served.saved()
    # the first of each found nothing, and the last of two with one salt did
    assert {key: n > 200 for key, n in seen.items()} == {key: key[1] == "one" for key in seen}
    ann, body = {"X-Tenant": "ann"}, {"prompt": "a", "cache_salt": 7}
    assert served.post("/completion", json=body, headers=ann).status_code == 400
    assert served.post("/completion", json={"prompt": "Hello"}, headers={}).status_code == 401
    assert served.get("/slots", headers=ann).status_code == 403
    assert served.get("/prefixstore/status", headers=ann).status_code == 401


@pytest.mark.slow
def test_tenants_whose_slot_the_server_chooses_find_only_their_own_prompts(serve: Serve):
    served = serve(options=("--salt-from", "header:X-Tenant", "--admin-key", "sk-admin"), headers=of_key("sk-admin"))
    message = {"messages": [{"role": "user", "content": prompt(4)}], "max_tokens": 4}

    def ask(tenant: str, **fields: Any) -> int:
        answer = served.post("/v1/messages", json=message | fields, headers={"X-Tenant": tenant})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"].get("cache_read_input_tokens", 0))

    assert ask("ann") == 0
    assert ask("ann") > 200
    served.saved()
    assert ask("bob") == 0
    served.saved()
    # her slot was emptied for bob, and is filled from the store
    assert ask("ann") > 200
    assert served.counts(1, "prefixstore_requests_total", source="store", endpoint="/v1/messages")
    assert ask("bob") > 200
    # what the store is not asked for is not found by another either
    assert ask("cem", steering=1) == 0
    assert ask("dee") == 0
    for options in ({"n_cmpl": 2}, {"prompt": [prompt(5), prompt(5)]}, {"cache_prompt": False}):
        body = {"prompt": prompt(5), "n_predict": 2} | options
        for tenant in ("ann", "bob"):
            answer = served.post("/completion", json=body, headers={"X-Tenant": tenant}).json()
            assert {cached(one) for one in (answer if isinstance(answer, list) else [answer])} == {0}
        assert cached(served.complete(prompt(5), headers={"X-Tenant": "bob"})) in (0, *range(200, 2000))
    with ThreadPoolExecutor(6) as pool:
        assert min(pool.map(ask, ["ann", "bob", "dee"] * 4)) >= 0
    assert not any(slot["in_use"] for slot in served.status()["slots"])


@pytest.mark.slow
def test_a_tenant_with_a_quota_evicts_its_own_pages_and_all_of_them_expire(serve: Serve, tmp_path: Path):
    served = serve(
        options=("--salt-from", "header:X-Tenant", "--quota", "6MiB", "--ttl", "30d", "--admin-key", "sk-admin"),
        headers=of_key("sk-admin"),
    )
    served.complete(prompt(1), headers={"X-Tenant": "ann"})
    served.saved()
    for i in range(2, 12):
        served.complete(prompt(i), headers={"X-Tenant": "bob"})
        served.until(lambda status: all(one["unsaved_tokens"] < 32 for one in status["slots"]))
        served.until(lambda status: not status["copies"] and not status["store"]["queued_bytes"])
    assert served.stop() == 0
    with Archive(tmp_path / "store", read_only=True) as archive:
        sizes: dict[str | None, int] = {}
        for one in archive.holdings():
            assert one.namespace is not None
            sizes[one.namespace.salt] = one.stored_bytes
        pages = list(archive.engine.lookups.pages())
    assert sizes["x-tenant:ann"] > 0
    assert 0 < sizes["x-tenant:bob"] <= 6 << 20
    assert all(page.expires > page.created for page in pages)


# -- what the answer says ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_answer_says_what_was_restored_and_why_not_more(serve: Serve):
    served = serve("-np", "1")

    def told(path: str = "/completion", **fields: Any) -> str:
        return served.post(path, json={"n_predict": 4, "temperature": 0, **fields}).headers["x-prefixstore"]

    cold = told(prompt=prompt(1))
    n = int(cold.split()[2].rstrip(";"))
    assert cold == f"restored=0 of {n}; computed={n}; reason=not_found"
    live = told(prompt=prompt(1))
    assert live == served.status()["slots"][0]["last_prompt"] == f"restored=0 of {n}; computed=1; reason=live"
    served.saved()
    told(prompt=prompt(2))
    served.saved()
    assert told(prompt=prompt(1), stream=True) == f"restored={n} of {n}; computed=1"
    assert told(prompt="a", best_of=2) == "restored=0; reason=several_answers"
    assert told(prompt="a", steering=1) == "restored=0; reason=unknown_field"
    # what an answer says at its beginning, or not at all, is counted, too
    before = served.status()["store"]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": prompt(3)}], "ignore_eos": True}
    for source in ("none", "live"):
        told("/v1/messages", **chat, max_tokens=200, stream=True)
        assert served.counts(1, "prefixstore_requests_total", endpoint="/v1/messages", source=source)
    told(prompt=prompt(1), response_fields=["content"])
    assert served.counts(2, "prefixstore_requests_total", endpoint="/completion", source="store")
    after = served.status()["store"]
    assert after["live_hits"] - before["live_hits"] == 1
    assert after["prompt_tokens"] == served.metric("prefixstore_request_prompt_tokens_total")


# -- a store that cannot be opened ------------------------------------------------------------------------------------


def damage(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    (store / "data.mdb").write_bytes(os.urandom(20_000))
    return store


def damage_own(tmp_path: Path) -> Path:
    """As `damage`, of what was a store."""
    store = tmp_path / "store"
    PrefixStore(store).close()
    with (store / "data.mdb").open("r+b") as file:
        file.write(bytes(8192))
    return store


def _answers_without_the_store(served: Served, says: str) -> None:
    assert served.get("/prefixstore/health").status_code == 200
    answer = served.post("/completion", json={"prompt": prompt(1), "n_predict": 4})
    assert (answer.status_code, answer.headers["x-prefixstore"]) == (200, "restored=0; reason=store_failed")
    status = served.status()
    assert (status["passed_through"], says in status["why"]) == ("store_failed", True)
    assert "prefixstore_location_up" not in served.get("/metrics").text
    assert served.counts(1, "prefixstore_requests_passed_total", reason="store_failed")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--on-damage", "aside")])
@pytest.mark.parametrize("says", ["is not an LMDB environment", "is a file"])
def test_a_damaged_store_costs_the_cache_and_what_is_no_store_is_never_moved_aside(
    says: str, options: tuple[str, ...], serve: Serve, tmp_path: Path
):
    file = tmp_path / "store" if says == "is a file" else damage(tmp_path) / "data.mdb"
    file.write_bytes(before := os.urandom(20_000))
    served = serve(options=options)
    assert "THE STORE CANNOT BE USED" in served.text()
    assert "nothing is stored or restored: store_failed\n" in served.text()
    # once
    assert served.text().count(says) == 1
    _answers_without_the_store(served, says)
    assert served.stop() == 0
    assert {path.name for path in file.parent.iterdir()} <= {file.name, "lock.mdb", "served0.log"}
    assert file.read_bytes() == before


@pytest.mark.slow
def test_a_damaged_store_is_moved_aside_if_that_is_wanted(serve: Serve, tmp_path: Path):
    store = damage_own(tmp_path)
    before = (store / "data.mdb").read_bytes()
    served = serve(options=("--on-damage", "aside"))
    served.complete(prompt(1))
    served.saved()
    assert served.metric("prefixstore_location_up") == 1
    assert served.stop() == 0
    (aside,) = store.glob("damaged-*")
    assert (aside / "data.mdb").read_bytes() == before
    assert f"its files were moved to {aside}" in served.text()
    assert cached(serve().complete(prompt(1))) > 200


@pytest.mark.slow
@pytest.mark.parametrize(("damaged", "says"), [(damage, "is not an LMDB environment"), (damage_own, "is damaged")])
def test_a_damaged_store_keeps_the_server_from_starting_if_that_is_wanted(
    damaged: Callable[[Path], Path], says: str, serve: Serve, tmp_path: Path
):
    damaged(tmp_path)
    served = serve(options=("--on-damage", "fail"), ready=False)
    assert served.ended() == 3
    assert says in served.text()
    assert not any(said in served.text() for said in ("THE STORE CANNOT BE USED", "load_model"))
