"""The chat server of docs/sessions.md, as it stands there."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial

import pytest

from prefixstore.testing.together import together
from tests.support import ROOT
from tests.support.untimed import untimed

SERVER = next(
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sessions.md").read_text(), re.DOTALL)
    if "ThreadingHTTPServer" in block
)


@contextmanager
def serving(tmp_path, model, end=signal.SIGINT):
    """A running server: its address, and what it says at its start."""
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen(
        untimed("server.py", model, tmp_path / "kv", 0),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield line.split(" ")[0], line
    finally:
        process.send_signal(end)
        assert process.wait(180) == 0
        process.stdout.close()


def post(address, **body):
    return send(address, json.dumps(body).encode())


def send(address, body):
    request = urllib.request.Request(address, body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_the_server_of_the_documentation(models, tmp_path):
    assert len([line for line in SERVER.splitlines() if line.strip()]) <= 40
    model = str(models("llama"))
    users = [f"user {i}" for i in range(4)]
    said = {user: [{"role": "user", "content": f"I am {user}. " + "Tell me more. " * 20}] for user in users}
    counts = {}

    def talk(address, user):
        status, answer = post(address, user=user, messages=said[user], max_tokens=8)
        assert status == 200
        said[user] += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        counts.setdefault(user, []).append((answer["session"]["source"], answer["session"]["tokens"]))

    with serving(tmp_path, model) as (address, _):
        for _ in range(2):
            together(*(partial(talk, address, user) for user in users))
        assert post(address, user="", messages=[])[0] == 400
        assert post(address, messages=[]) == (400, {"error": "'user' is missing in the request"})
        for body in (
            b"",
            b"{",
            b"\xff",
            b"[]",
            b"null",
            b'{"user": 1, "messages": []}',
            b'{"user": "a", "messages": 5}',
        ):
            assert send(address, body)[0] == 400, body
    with serving(tmp_path, model) as (address, line):
        assert str(users) in line
        for user in users:
            talk(address, user)
    for user in users:
        sources, tokens = zip(*counts[user], strict=True)
        assert sources[0] == "cold"
        assert sources[2] == "store"
        assert tokens[0] < tokens[1] < tokens[2]


@pytest.mark.slow
def test_it_loses_nothing_when_it_is_told_to_end(models, tmp_path):
    model = str(models("llama"))
    said = [{"role": "user", "content": "Tell me more. " * 20}]
    with serving(tmp_path, model, signal.SIGTERM) as (address, _):
        # the last one is not written yet
        assert post(address, user="bob", messages=said, max_tokens=1)[0] == 200
        under_way = http.client.HTTPConnection(address.removeprefix("http://"), timeout=180)
        under_way.request("POST", "/", json.dumps({"user": "alice", "messages": said, "max_tokens": 200}))
        # connections are accepted in order
        assert send(address, b"{")[0] == 400
    answer = under_way.getresponse()
    assert (answer.status, json.load(answer)["session"]["source"]) == (200, "cold")
    under_way.close()
    with serving(tmp_path, model, signal.SIGTERM) as (_, line):
        assert "['alice', 'bob']" in line
