"""Four servers and a warming job on one location, of every backend that processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixstore import PrefixStore
from prefixstore.maintenance.archive import Archive
from tests.support import PATIENCE, ROOT
from tests.support.models import answer, load, prompt
from tests.support.places import SCHEMES, place
from tests.support.serving import tokens_of

SERVERS = 4
COMMON, OWN = 600, 200


class Server:
    """A process that answers prompts."""

    def __init__(self, stack, model, location, **options):
        command = [sys.executable, "-m", "tests.support.serving", "serve", str(model), location, json.dumps(options)]
        self.process = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)

    def ask(self, seed, **more):
        job = {"common": COMMON, "own": OWN, "seed": seed, **more}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def result(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0


@pytest.fixture(params=SCHEMES)
def location(request, tmp_path):
    return place(request.param, tmp_path, request)


@pytest.fixture
def servers(models, location):
    """Starts servers on the location, all at once."""
    with ExitStack() as stack:

        def start(**options):
            started = [Server(stack, models("llama"), location, **options) for _ in range(SERVERS)]
            assert all("ready" in server.result() for server in started)
            return started

        yield start


def warmer(model, location, tmp_path, seeds, *more):
    """``prefixstore warm`` in a process of its own."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"tokens": tokens_of({"common": COMMON, "own": OWN, "seed": seed})} for seed in seeds]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # the command, for which no location is slow
    command = [sys.executable, "-m", "tests.support.warming", "warm", "--model", str(model), "--store", location]
    command += ["--json", "--n-ctx", "4096", "--threads", "1", *more, str(prompts)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def no_error_in(result):
    assert not {"error", "unavailable"} & result["misses"].keys()
    assert set(result["dropped"]) <= {"orphan", "budget"}
    assert set(result["unreadable"]) <= {"vanished"}


def test_each_server_finds_what_any_other_has_committed(servers, models, location, tmp_path):
    started = servers()
    for seed, author in enumerate(started):
        author.ask(seed)
        first = author.result()
        assert first["gained"] >= (COMMON if seed else 0) // 256 * 256
        for other in started:
            other.ask(seed)
            found = other.result()
            assert found["gained"] == COMMON + OWN - 1
            no_error_in(found)
    with warmer(models("llama"), location, tmp_path, [100, 101]) as job:
        report = json.loads(job.communicate(timeout=5 * PATIENCE)[0])
        assert job.returncode == 0
    # what the servers have of it was not computed again
    assert report["evaluated_tokens"] <= 2 * OWN + 2 + COMMON % 256
    for server in started:
        for seed in (100, 101):
            server.ask(seed)
            assert server.result()["gained"] == COMMON + OWN - 1
        server.end()
    with Archive(location, read_only=True) as archive:
        assert archive.check() == []


def test_servers_at_the_same_time_answer_as_alone_and_leave_a_sound_store(servers, models, location, tmp_path):
    started = servers(max_bytes="60MB")
    with warmer(models("llama"), location, tmp_path, range(20, 26), "--max-bytes", "60MB") as job:
        seeds = [[1, 2, 3, 20], [2, 3, 4, 21], [3, 4, 5, 22], [4, 5, 6, 23]]
        for i in range(4):
            for server, mine in zip(started, seeds, strict=True):
                server.ask(mine[i], flush=False)
        results = {server: [server.result() for _ in range(4)] for server in started}
        _, errors = job.communicate(timeout=5 * PATIENCE)
        assert job.returncode == 0, errors
    for server in started:
        server.end()
    for found in results.values():
        no_error_in(found[-1])
    llm = load(models("llama"))
    texts = {}
    for seed in {seed for mine in seeds for seed in mine}:
        llm.reset()
        texts[seed] = answer(llm, tokens_of({"common": COMMON, "own": OWN, "seed": seed}), 6)
    for server, mine in zip(started, seeds, strict=True):
        assert [one["text"] for one in results[server]] == [texts[seed] for seed in mine]
    with PrefixStore(location, llm, max_bytes="60MB") as store:
        assert store.check() == []
        for seed in [*range(1, 7), *range(20, 26)]:
            tokens = tokens_of({"common": COMMON, "own": OWN, "seed": seed})
            assert store.match(tokens).n_tokens == len(tokens)


def test_budgets_hold_with_many_writers(servers, models, location, tmp_path):
    limit = 3 << 20
    started = servers(max_bytes=limit)
    with warmer(models("llama"), location, tmp_path, range(50, 58), "--max-bytes", str(limit)) as job:
        for i in range(6):
            for n, server in enumerate(started):
                server.ask(10 * n + i, flush=False)
            with Archive(location, read_only=True) as archive:
                assert archive.used().bytes <= limit
        results = [[server.result() for _ in range(6)][-1] for server in started]
        job.communicate(timeout=5 * PATIENCE)
        # there is no room for all of its prompts, which it reports
        assert job.returncode in (0, 1)
    for server, found in zip(started, results, strict=True):
        no_error_in(found)
        server.end()
    with Archive(location, read_only=True) as archive:
        assert archive.check(limit) == []
        assert archive.used().entries > 3
    if location.startswith("lmdb"):
        size = (Path(location.removeprefix("lmdb://")) / "data.mdb").stat().st_size
        assert size <= 1.25 * limit + (1 << 20)


def test_workers_forked_from_an_open_store_serve(models, location):
    jobs = [{"common": COMMON, "own": OWN, "seed": seed} for seed in range(4)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.serving", "fork", str(models("llama")), location, "{}"],
        cwd=ROOT,
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["codes"] == [0] * 4, done.stderr
    assert result["found"] == [len(prompt(COMMON)) + OWN] * 4
    assert result["check"] == []
