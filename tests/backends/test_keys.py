"""Where keys come from, and what is said if there are none."""

import base64
import shlex
import sys
from dataclasses import dataclass

import pytest

from prefixstore import InvalidParameterError, KeyProvider, LocationError, UnavailableError
from prefixstore.backends import encryption_keys
from prefixstore.backends.encryption_keys import ENVIRONMENT, Keys, key_id, line_of, provider_of

KEY, OLDER, OF_ALICE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
BOB = "bob & co %#\udcff"
OWNED = [(OLDER, None), (OF_ALICE, "alice"), (bytes(32), BOB), (bytes([1] * 32), "alice"), (KEY, None)]
TEXT = "".join(["# keys\n", *(line_of(key, name) for key, name in OWNED), "tenant carol forgotten:00112233aabbccdd \n"])
GONE = bytes.fromhex("00112233aabbccdd")
KEYS = Keys(
    {key_id(key): key for key, _ in OWNED},
    {owner: [key_id(key) for key, name in OWNED if name == owner] for owner in (None, "alice", BOB)},
    {GONE: "carol"},
)


def written(tmp_path, text=None, mode=0o600):
    path = tmp_path / "keys"
    path.write_text(TEXT if text is None else text)
    path.chmod(mode)
    return path


def test_a_file_of_keys_comes_back_with_the_newest_first():
    assert Keys.parse(TEXT, "file") == KEYS
    assert KEYS.newest == key_id(KEY)
    assert set(KEYS.current) == {key_id(key) for key, _ in OWNED[2:]}
    assert KEYS.missing([key_id(OLDER), GONE, b"unknown."]) == [b"unknown."]


def test_keys_come_from_a_file_a_variable_a_command_or_an_object(tmp_path, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setenv("MY_KEYS", base64.b64encode(KEY).decode())
    command = shlex.join([sys.executable, "-c", f"print({TEXT!r})"])

    class Mine:
        def read(self):
            return TEXT

    assert isinstance(Mine(), KeyProvider)
    for source in (f"file:{path}", f"command:{command}", Mine()):
        assert Keys.read(provider_of(source)) == KEYS
    assert Keys.read(provider_of("env:MY_KEYS")).secrets == {key_id(KEY): KEY}
    monkeypatch.setenv(ENVIRONMENT, f"file:{path}")
    assert Keys.read(provider_of(None)) == KEYS
    assert provider_of("none") is None
    # what should have given it may have failed
    monkeypatch.setenv(ENVIRONMENT, "")
    with pytest.raises(InvalidParameterError, match="PREFIXSTORE_KEY"):
        provider_of(None)
    monkeypatch.delenv(ENVIRONMENT)
    assert provider_of(None) is None


@pytest.mark.parametrize("key", ["", "secret", "file:", "command: ", "http://host/key", 5, b"file:x"])
def test_anything_else_is_refused_and_not_repeated(key):
    with pytest.raises(InvalidParameterError) as raised:
        provider_of(key)
    assert "secret" not in str(raised.value)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    with pytest.raises(LocationError, match="chmod o="):
        Keys.read(provider_of(f"file:{written(tmp_path, mode=0o604)}"))
    link = tmp_path / "link"
    link.symlink_to(written(tmp_path))
    assert Keys.read(provider_of(f"file:{link}")) == KEYS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "key abc\n",
        "word " + base64.b64encode(KEY).decode(),
        "tenant alice\n",
        "key\n",
        "forgotten:0011223344556677\n",
        "tenant bob forgotten:00\n",
        # one key of two
        line_of(KEY) + line_of(KEY, "alice"),
    ],
)
def test_what_is_no_key_is_said_without_repeating_it(tmp_path, text):
    with pytest.raises(LocationError) as raised:
        Keys.read(provider_of(f"file:{written(tmp_path, text)}"))
    assert "prefixstore key new" in str(raised.value)
    assert base64.b64encode(KEY).decode() not in str(raised.value)


def test_what_gives_no_keys_says_why(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setattr(encryption_keys, "COMMAND_SECONDS", 1)
    reasons = {
        f"file:{tmp_path}/none": "No such file",
        "env:NOT_SET": "NOT_SET has no key",
        "command:false": "ended with code 1",
        "command:/no/such/program secret": "No such file",
        'command:"secret': "ValueError",
        "command:echo secret": "line 1 of the command",
        rf"command:printf '{line_of(KEY).strip()}\nsecret\n'": "line 2 of the command",
        r"command:printf '\377'": "UnicodeDecodeError",
        "command:sh -c 'sleep 60 | cat'": "has not ended after 1 s",
    }
    for source, reason in reasons.items():
        with pytest.raises(LocationError, match=reason) as raised:
            Keys.read(provider_of(source))
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("given", [ConnectionError("no network"), b"bytes", None])
def test_a_provider_that_fails_makes_the_location_unavailable(given):
    class Failing:
        def read(self):
            if isinstance(given, Exception):
                raise given
            return given

    with pytest.raises(UnavailableError, match="gives no keys"):
        Keys.read(Failing())


def test_no_key_is_shown_with_what_has_it():
    @dataclass
    class Holder:
        text: str

        def read(self):
            return "nothing"

    with pytest.raises(LocationError) as raised:
        Keys.read(Holder(line_of(KEY)))
    shown = [str(raised.value), repr(KEYS), repr(provider_of("command:vault read --token=S3CRET"))]
    assert "Holder" in shown[0]
    assert not any(secret in text for text in shown for secret in (line_of(KEY).split()[1], str(KEY), "S3CRET"))
