"""What is told to Prometheus: of stores, of a server's requests; and the dashboard and alerts on it."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from prefixstore import PrefixStore
from prefixstore.errors import ClosedError, InvalidParameterError
from prefixstore.metrics import ENDPOINTS, RequestMetrics, StoreMetrics, new_registry, render
from prefixstore.metrics.stores import METRICS
from prefixstore.results import SessionCounts, Stats
from tests.support import ROOT
from tests.support.engines import A, MemoryPages, snapshot_of, store_of
from tests.support.exposition import names, problems, samples, value
from tests.support.faults import FlakyBackend
from tests.support.models import answer, caching, prompt

DOCS = ROOT / "docs"
LOCATIONS = ("memory:", "lmdb")


def text_of(registry):
    body, content_type = render(registry)
    assert content_type.startswith("text/plain; version=")
    return body.decode()


# -- a store ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_store_tells_what_its_statistics_say_and_follows_the_conventions(llama, tmp_path, location):
    llm, tokens = llama(), prompt(700)
    with caching(tmp_path / "kv" if location == "lmdb" else location, llm) as store:
        assert problems(store.metrics()) == []
        answer(llm, tokens, 1)  # a miss
        answer(llm, tokens, 1)  # live
        store.flush()
        llm.reset()
        answer(llm, tokens, 1)  # from the store
        text, stats = store.metrics(), store.stats()
        assert problems(text) == []
        for name, expected in {
            "prefixstore_prompt_tokens_total": 2100,
            "prefixstore_restored_tokens_total": 699,
            "prefixstore_computed_tokens_total": stats.tokens_computed,
            "prefixstore_lookup_seconds_count": 3,
            "prefixstore_restore_seconds_count": 1,
            "prefixstore_restore_seconds_sum": stats.restore_seconds,
            "prefixstore_capture_seconds_total": stats.capture_seconds,
            # each of the three pages was used for the first time, soon after it was captured
            "prefixstore_first_reuse_seconds_count": 3,
            "prefixstore_eviction_age_seconds_count": 0,
            "prefixstore_outages_total": 0,
            "prefixstore_written_pages_total": stats.allocations,
            "prefixstore_deleted_pages_total": 0,
            "prefixstore_peak_bytes": stats.peak_bytes,
            "prefixstore_pages": stats.entries,
            "prefixstore_stored_bytes": stats.bytes_stored,
            "prefixstore_state_bytes": stats.bytes_raw,
            "prefixstore_queue_budget_bytes": store.engine.queue_bytes,
            "prefixstore_location_up": 1,
        }.items():
            assert value(text, name) == pytest.approx(expected), name
        for source in ("store", "live", "none"):
            assert value(text, "prefixstore_lookups_total", source=source) == 1
        assert value(text, "prefixstore_misses_total", reason="not_found") == 1
        assert value(text, "prefixstore_captured_pages_total", form="page") == stats.pages_captured == 3
        assert value(text, "prefixstore_used_bytes") == stats.bytes_used
        assert value(text, "prefixstore_budget_bytes") == store.capacity_bytes
        assert stats.prompt_tokens == 2100
        assert stats.allocations == 3
        assert stats.peak_bytes > 0


def test_several_stores_share_a_registry_by_name():
    with store_of() as one, store_of() as two:
        registry = new_registry()
        metrics = StoreMetrics(registry)
        assert text_of(registry) == ""
        metrics.add(one, "chat")
        metrics.add(two, "code")
        one.put(A)
        text = text_of(registry)
        assert problems(text) == []
        assert value(text, "prefixstore_pages", store="chat") == 3
        assert value(text, "prefixstore_pages", store="code") == 0
        metrics.remove("chat")
        assert "chat" not in text_of(registry)
        with pytest.raises(InvalidParameterError, match="add"):
            StoreMetrics(registry, one)


def test_what_waits_what_was_given_up_and_what_was_written_and_deleted_is_told():
    with store_of(backend := FlakyBackend(MemoryPages(), "update")) as store:
        backend.gate.clear()
        writer, registry = store.engine, new_registry()
        StoreMetrics(registry, writer)
        # a tail, and the page that continues it, before either is written
        for tokens in (A[:6], A[:7]):
            store.submit(tokens)
        assert writer.write_queue.submit(snapshot_of(store, A[:5]))
        text = text_of(registry)
        assert value(text, "prefixstore_pending_pages", form="page") == 2
        assert value(text, "prefixstore_pending_pages", form="snapshot") == 1
        assert value(text, "prefixstore_outdated_pages_total", reason="superseded") == 1
        assert value(text, "prefixstore_written_pages_total") == 0
        backend.gate.set()
        writer.drain()
        before = text_of(registry)
        assert value(before, "prefixstore_pending_pages", form="page") == 0
        assert value(before, "prefixstore_written_pages_total") == value(before, "prefixstore_pages") == 3
        assert store.counters.group("dropped") == {}
        writer.upkeep.clear(None)
        text = text_of(registry)
        assert problems(text) == []
        assert value(text, "prefixstore_deleted_pages_total") == 3
        peak = value(before, "prefixstore_peak_bytes")
        assert value(text, "prefixstore_peak_bytes") == peak > value(text, "prefixstore_used_bytes")


# -- when something is wrong ------------------------------------------------------------------------------------------


def test_a_scrape_of_a_location_that_fails_tells_the_last_known_sizes():
    with store_of(backend := FlakyBackend(MemoryPages(), "view")) as store:
        registry = new_registry()
        StoreMetrics(registry, store)
        store.put(A)
        before = text_of(registry)
        backend.fails = True
        text = text_of(registry)
        assert value(before, "prefixstore_location_up") == 1
        assert value(text, "prefixstore_location_up") == 0
        for name, labels in (("prefixstore_pages", {}), ("prefixstore_used_bytes", {})):
            assert value(text, name, **labels) == value(before, name, **labels) > 0
        assert problems(text) == []
        backend.fails = False
        assert value(text_of(registry), "prefixstore_location_up") == 1


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_closed_store_says_so_and_a_server_goes_on_telling_its_last_values(llama, tmp_path, location):
    llm = llama()
    store = PrefixStore(tmp_path / "kv" if location == "lmdb" else location, llm)
    registry = new_registry()
    StoreMetrics(registry, store)
    llm.set_cache(store)
    answer(llm, prompt(600), 1)
    store.flush()
    before = samples(text_of(registry))
    store.close()
    after = samples(text_of(registry))
    changed = {name for (name, labels), number in after.items() if before[name, labels] != number}
    assert changed == {"prefixstore_location_up"}
    with pytest.raises(ClosedError):
        store.metrics()
    with pytest.raises(ClosedError):
        StoreMetrics(new_registry(), store)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_requests_are_counted_by_endpoint_source_and_reason():
    registry = new_registry()
    requests = RequestMetrics(registry)
    requests.observe(
        "/v1/chat/completions",
        source="store",
        reason=None,
        prompt_tokens=1000,
        live_tokens=100,
        restored_tokens=800,
        computed_tokens=100,
        lookup_seconds=0.0002,
        restore_seconds=0.03,
        saved_seconds=1.5,
    )
    requests.observe("/completion", "none", "not_found", 50, 0, 0, 50, 0.0001)
    requests.observe("/completion", "live", None, 50, 49, 0, 1)
    requests.passed("/v1/chat/completions", "images")
    text = text_of(registry)
    assert problems(text) == []
    chat, plain = "/v1/chat/completions", "/completion"
    for (name, endpoint), expected in {
        ("prompt_tokens_total", chat): 1000,
        ("live_tokens_total", chat): 100,
        ("restored_tokens_total", chat): 800,
        ("computed_tokens_total", chat): 100,
        ("saved_seconds_total", chat): 1.5,
        ("lookup_seconds_sum", chat): 0.0002,
        ("restore_seconds_count", chat): 1,
        ("prompt_tokens_total", plain): 100,
        ("lookup_seconds_count", plain): 1,
    }.items():
        assert value(text, f"prefixstore_request_{name}", endpoint=endpoint) == expected, name
    assert value(text, "prefixstore_requests_total", endpoint=chat, source="store") == 1
    assert value(text, "prefixstore_requests_total", endpoint=plain, source="live") == 1
    assert value(text, "prefixstore_request_misses_total", endpoint=plain, reason="not_found") == 1
    assert value(text, "prefixstore_requests_passed_total", endpoint=chat, reason="images") == 1
    with pytest.raises(InvalidParameterError, match="one RequestMetrics"):
        RequestMetrics(registry)


def test_the_labels_of_requests_are_bounded_whatever_clients_ask_for():
    registry = new_registry()
    requests = RequestMetrics(registry)
    for n in range(2000):
        requests.observe(f"/v1/secret-{n}", "none", "not_found", 1)
        requests.passed(f"/completion?key={n}", "lora")
    text = text_of(registry)
    assert problems(text) == []
    assert value(text, "prefixstore_request_prompt_tokens_total", endpoint="other") == 2000
    assert {dict(labels).get("endpoint", "other") for _, labels in samples(text)} <= ENDPOINTS | {"other"}


# -- the dashboard, the alerts, the document --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything():
    """A text with every metric: of a store and of requests."""
    with store_of(max_entries=10) as store:
        registry = new_registry()
        counted = SessionCounts(*[1] * 9)
        store.engine.sessions = lambda: lambda: counted
        StoreMetrics(registry, store)
        requests = RequestMetrics(registry)
        for source in ("store", "live", "none"):
            requests.observe("/completion", source, "not_found", 1, lookup_seconds=0.1, restore_seconds=0.1)
        for reason in ("lora", "version"):
            requests.passed("/completion", reason)
        return text_of(registry)


def family_of(name):
    return re.sub(r"_(bucket|sum|count)$", "", name)


def dashboard():
    return json.loads((DOCS / "grafana.json").read_text())


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules():
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries():
    found = [(f"panel {panel['title']}", target["expr"]) for panel in panels() for target in panel["targets"]]
    return found + [(f"alert {rule['alert']}", rule["expr"]) for rule in rules()]


def test_every_metric_label_and_value_in_the_dashboard_and_the_alerts_exists(everything):
    exposed = samples(everything)
    known: dict = {}
    for name, labels in exposed:
        for label, text in labels:
            known.setdefault(name, {}).setdefault(label, set()).add(text)
        known.setdefault(name, {})
    for where, query in queries():
        used = re.findall(r"(prefixstore_\w+)(?:\{([^}]*)\})?", query)
        assert used, where
        for name, matchers in used:
            assert name in known, (where, name)
            for label, how, text in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', matchers):
                if label in ("job", "instance"):
                    assert text == f"${label}", where
                    continue
                assert label in known[name], (where, name, label)
                for one in text.split("|") if "~" in how else [text]:
                    assert one in known[name][label], (where, name, label, one)
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            labels = {label for name, _ in used for label in known[name]} | {"job", "instance"}
            assert {label.strip() for label in grouped.split(",")} <= labels, where
        assert query.count("(") == query.count(")"), where


def test_every_alert_says_what_to_do():
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
        assert rule["annotations"]["runbook_url"].endswith("docs/operations.md#runbook")


def test_the_list_of_metrics_has_each_and_no_other(everything):
    hooks = pytest.importorskip("docs.hooks", reason='needs the extra "docs"')
    rows = re.findall(r"^\| `(prefixstore_\w+)", hooks.metrics(), re.MULTILINE)
    exposed = {family_of(name) for name in names(everything)}
    assert sorted(rows) == sorted(exposed)


def test_the_reasons_that_are_told_from_the_start_are_those_of_the_statistics():
    with store_of() as store:
        groups = [metric.read(store.engine) for metric in METRICS.values() if metric.label == "reason"]
    assert len(groups) == 4
    for reasons in groups:
        assert [reason for reason in reasons if f'``"{reason}"``' not in (Stats.__doc__ or "")] == []
