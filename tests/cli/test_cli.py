"""The commands, as an operator runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from prefixstore import PrefixStore
from prefixstore.cli.app import COMMANDS, GROUPS
from prefixstore.format.record import Usage, checksum
from prefixstore.maintenance.archive import Archive
from prefixstore.models.vocabulary import Vocabulary
from tests.support.models import answer, caching, load, prompt
from tests.support.places import contents, fill, space
from tests.support.signals import default_signals

ROOT = Path(__file__).parents[2]
NAMES = [one.partition(".")[2] for some in COMMANDS.values() for one in some.split()]
OF_GROUPS = [f"{name} {one.partition('.')[2]}" for name, (_, some) in GROUPS.items() for one in some.split()]
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 10], [20, 21, 22, 23, 24], [30, 31])
MINE, YOURS = space("mine"), space("yours")


@pytest.fixture(params=["lmdb", "sqlite"])
def store(request, tmp_path):
    """A location with two tenants."""
    location = f"lmdb://{tmp_path}/kv" if request.param == "lmdb" else f"sqlite:///{tmp_path}/kv.db"
    with Archive(location, create=True) as archive:
        fill(archive.backend, MINE, SEQUENCES)
        fill(archive.backend, YOURS, SEQUENCES[:1])
    return location


@pytest.fixture(scope="session")
def served(models, tmp_path_factory):
    """A model, its tokens as text, and a location that served some prompts."""
    location = str(tmp_path_factory.mktemp("served") / "kv")
    llm = load(models("llama"))
    with PrefixStore(location, llm) as cache:
        llm.set_cache(cache)
        for seed in (1, 2):
            answer(llm, prompt(600) + prompt(100, seed), 8)
    return models("llama"), location


def process(*arguments, **options):
    command = [sys.executable, "-m", "prefixstore", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=default_signals, **pipes, **options)  # noqa: PLW1509 - it only sets handlers


# -- every command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted({*NAMES, *OF_GROUPS} - {*GROUPS, "serve"}))
def test_every_command_has_help_with_an_example_and_json(run, command):
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert f"Example: prefixstore {command} " in " ".join(out.split())
    assert "--json" in out
    # each argument and option says in a word what it takes
    assert not re.search(r" <\w", out)


def test_all_commands_are_listed_and_can_be_completed(run):
    code, out, _ = run("--help")
    assert code == 0
    assert sorted(re.findall(r"^  (\w+)  ", out, re.MULTILINE)) == sorted(NAMES)
    assert "--install-completion" in out
    assert run("--version")[1].strip() == __import__("prefixstore").__version__


COMPLETION = {"_PREFIXSTORE_COMPLETE": "complete_bash", "COMP_WORDS": "prefixstore st", "COMP_CWORD": "1"}
CALL = "from prefixstore.cli import main; main({})"


@pytest.mark.parametrize(
    ("code", "environment", "ours"),
    [
        ("import prefixstore", {}, {"errors"}),
        (CALL.format("['--version']"), {}, {"errors", "cli", "cli.app"}),
        (CALL.format("['--help']"), {}, {"errors", "cli", "cli.app"}),
        (CALL.format("[]"), COMPLETION, {"errors", "cli", "cli.app"}),
    ],
)
def test_the_package_the_help_and_the_completion_load_little(code, environment, ours):
    """What is not loaded takes no time: without numpy, rich and the engine, `--help` starts in a tenth of a second."""
    listed = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before, file=sys.stderr)"
    command = [sys.executable, "-c", listed]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert {name for name in loaded if name.split(".")[0] == "prefixstore"} == {
        "prefixstore",
        *(f"prefixstore.{name}" for name in ours),
    }
    others = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"prefixstore"}
    # typer, with what it needs
    assert environment or others <= {"annotated_doc", "click", "shellingham", "typer", "typing_extensions"}


@pytest.mark.slow
def test_commands_that_only_read_do_not_need_llama_cpp_also_to_show_text(store, models, tmp_path):
    code = (
        "import sys; sys.modules['llama_cpp'] = None; from prefixstore.cli import main\n"
        "text = ['--model', sys.argv[2]]\n"
        "commands = ['stats'], ['ls'], ['check'], ['tree', *text], ['report', '--out', sys.argv[3], *text]\n"
        "for name, *options in commands: assert main([name, sys.argv[1], *options]) == 0, name"
    )
    given = [sys.executable, "-c", code, store, models("llama"), tmp_path / "r.html"]
    subprocess.run(given, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_output_that_cannot_be_written_ends_a_command_without_a_traceback():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "prefixstore", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "prefixstore: the output cannot be written: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_with_its_code_and_leaves_no_partial_file(store, tmp_path, number, code):
    # a pipe that is not read keeps it busy
    os.mkfifo(tmp_path / "pipe")
    with process("import", tmp_path / "new", tmp_path / "pipe") as running:
        with (tmp_path / "pipe").open("wb"):
            time.sleep(0.3)
            running.send_signal(number)
            running.wait(120)
        assert running.returncode == code
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_command_that_waits_for_the_lock_of_another_process(store, run, tmp_path):
    assert run("export", store, "--out", tmp_path / "f")[0] == 0
    Archive(tmp_path / "other", create=True).close()
    os.mkfifo(tmp_path / "pipe")
    with lmdb.open(str(tmp_path / "other")) as env, env.begin(write=True):
        running = process("import", tmp_path / "other", tmp_path / "pipe")
        # it has started when it opens the pipe
        (tmp_path / "pipe").write_bytes((tmp_path / "f").read_bytes())
        for _ in range(2):
            time.sleep(1)
            running.send_signal(signal.SIGINT)
        assert "Traceback" not in running.communicate(timeout=25)[1]
    assert running.returncode == 130


# -- looking ----------------------------------------------------------------------------------------------------------


def test_stats_and_ls_count_what_is_stored(store, run, as_json):
    code, found = as_json("stats", store)
    assert code == 0
    assert {name: found[name] for name in ("pages", "namespaces", "tenants", "sequences", "stored_bytes")} == {
        "pages": 9,
        "namespaces": 2,
        "tenants": 2,
        "sequences": 5,
        "stored_bytes": 9000,
    }
    code, found = as_json("ls", store)
    assert {one["settings"]["salt"]: one["pages"] for one in found} == {"mine": 7, "yours": 2}
    code, out, _ = run("ls", store)
    assert code == 0
    assert re.search(rf"{MINE.key.hex()[:12]}.* mine +7 ", out)


def test_ls_tells_namespaces_of_one_model_apart(tmp_path, run):
    with Archive(str(tmp_path / "kv"), create=True) as archive:
        for n, more in enumerate(({"type_k": "f16"}, {"type_k": "q8_0"}, {"type_k": "q8_0", "salt": "one"})):
            fill(archive.backend, space(model="a" * 64, flash_attn_type=1, **more), [[n]])
        fill(archive.backend, space(model="b" * 64, type_k="f32"), [[9]])
    code, out, _ = run("ls", tmp_path / "kv")
    assert (code, out.count("type_k f16"), out.count("type_k q8_0")) == (0, 1, 2)
    assert not re.search("flash_attn|type_k f32", out)
    with Archive(str(tmp_path / "kv")) as archive:
        fill(archive.backend, space("a\nb", model="b" * 64, type_k="f32", flash_attn_type=0), [[9]])
    # as the setting is called, and each namespace in a line
    out = run("ls", tmp_path / "kv")[1]
    assert re.search(r" a↵b +flash_attn disabled +1 ", out), out


def test_tree_and_show_list_pages(store, run, as_json):
    code, found = as_json("tree", store)
    assert (code, len(found)) == (0, 9)
    code, found = as_json("tree", store, "--namespace", MINE.key.hex())
    assert len(found) == 7
    branch = next(page for page in found if page["start"] == 4)
    code, page = as_json("show", store, branch["page"][:10])
    assert (code, page["path"][-1], page["damage"]) == (0, branch["page"], None)
    code, out, _ = run("tree", store, "--namespace", MINE.key.hex())
    # a heading, a line for each branch, and a summary
    assert sorted(len(line) - len(line.lstrip()) for line in out.splitlines()) == [0, 0, 2, 2, 2, 4, 4]
    code, out, _ = run("show", store, branch["page"])
    assert (code, "computed in" in out, "compute us" in out) == (0, True, False)


def test_a_report_is_a_page_of_its_own(store, tmp_path, run, as_json):
    out = tmp_path / "r.html"
    code, printed, said = run("report", store, "--out", out, "--max-bytes", "1GiB")
    assert (code, printed) == (0, "")
    assert str(out) in said
    assert "9 pages" in said
    assert out.read_text().startswith("<!doctype html>")
    code, found = as_json("report", store, "--out", out, "--force")
    assert (code, found["pages"], found["labels"], found["max_bytes"]) == (0, 9, "tokens", None)
    assert {one["tenant"] for one in found["spaces"]} == {"mine", "yours"}
    assert sorted(path.name for path in tmp_path.iterdir() if "html" in path.name) == ["r.html"]


def test_with_a_model_text_is_shown_and_found(served, run, as_json):
    model, location = served
    words = Vocabulary(model)
    tail = words.text(prompt(100, 2)[20:40])
    code, pages = as_json("tree", location, "--model", model)
    assert code == 0
    assert "".join(page["text"] for page in pages if page["start"] == 0) == words.text(prompt(256))
    code, found = as_json("tree", location, "--model", model, "--containing", tail)
    assert code == 0
    assert 3 <= len(found) < len(pages)
    code, out, _ = run("tree", location, "--model", model)
    assert (code, sum("  tokens " in line and line.endswith('"') for line in out.splitlines())) == (0, 3)
    assert as_json("tree", location, "--model", model, "--containing", "no such text") == (1, [])


# -- caring -----------------------------------------------------------------------------------------------------------


def swap_payloads(location, one, other):
    """Give a page the state of another one, with valid checksums."""
    with Archive(location) as archive, archive.backend.update() as transaction:
        record, usage, payload = transaction.record(one), transaction.usage(one), bytes(transaction.payload(other))
        donor = transaction.record(other)
        changed = replace(record, checksum=checksum(payload), codec=donor.codec, stored_bytes=len(payload))
        transaction.delete(one)
        transaction.put(one, replace(changed, raw_bytes=donor.raw_bytes), usage, payload)


def damage_first_page(location):
    """Damage a page that another one follows; its key."""
    with Archive(location) as archive, archive.backend.update() as transaction:
        first = next(key for key, record, _ in transaction.scan() if record.namespace == YOURS.key and not record.start)
        record, usage = transaction.record(first), transaction.usage(first)
        transaction.delete(first)
        transaction.put(first, replace(record, checksum=bytes(16)), usage, bytes(1000))
    return first


def test_check_finds_damage_and_repairs_it(store, as_json, run):
    assert as_json("check", store)[0] == 0
    key = damage_first_page(store)
    code, found = as_json("check", store)
    assert code == 1
    assert [one["rule"] for one in found["violations"]] == ["payload"]
    # the one after it too, and no key in full
    code, out, _ = run("check", store)
    assert code == 1
    assert re.search(
        r"^check --repair would delete 2 pages \(.*\): damaged ones, and those after them$", out, re.MULTILINE
    )
    assert key.hex() not in out
    assert key.hex()[:12] in out
    code, found = as_json("check", store, "--repair", "--dry-run")
    assert (code, found["removed"]["pages"], found["dry_run"], len(found["left"])) == (1, 2, True, 1)
    assert run("check", store, "--repair", "--dry-run")[1] == out
    code, found = as_json("check", store, "--repair")
    assert (code, found["removed"]["pages"], found["left"]) == (0, 2, [])
    assert run("check", store, "--repair")[0] == 0
    assert as_json("check", store, "--max-bytes", "1KiB")[0] == 1


def test_bench_measures_and_leaves_no_trace(store, as_json):
    before = [as_json(name, store) for name in ("tree", "ls", "check")]
    code, found = as_json("bench", store)
    assert (code, found["read_bytes_per_second"] > 0, found["written_bytes_per_second"] > 0) == (0, True, True)
    assert [as_json(name, store) for name in ("tree", "ls", "check")] == before
    assert as_json("stats", store)[1]["last_31_days"]["allocations"] == 0


@pytest.mark.slow
def test_verify_compares_logits_and_finds_the_state_of_other_tokens(served, tmp_path, as_json, run):
    model, location = served
    code, found = as_json("verify", location, "--model", model, "--n-ctx", 2048)
    assert code == 0
    assert len(found["sequences"]) == 2
    assert found["largest"] < 0.01
    assert all(one["restored"] == one["n_tokens"] - 1 for one in found["sequences"])
    code, _, err = run("verify", location, "--model", model, "--n-ctx", 2048, "--salt", "another")
    assert code == 1
    assert "salt is another here, not set in the store" in err
    # wrong in a way that no checksum can detect
    copy = str(tmp_path / "copy")
    assert run("copy", location, copy)[0] == 0
    with Archive(copy) as archive:
        leaves = [page.key for page in archive.pages() if page.is_leaf]
        second = [page.key for page in archive.pages() if page.start == 256]
        first = [page.key for page in archive.pages() if page.start == 0]
    assert len(leaves) == 2
    swap_payloads(copy, second[0], first[0])
    # of tokens that the model does not have
    with Archive(copy) as archive, archive.backend.update() as transaction:
        record, payload = next(iter(transaction.fetch(first[:1])))
        record = replace(record, tokens=b"\xff" * len(record.tokens))
        transaction.put(record.key, record, Usage(1), bytes(payload))
    assert as_json("check", copy)[0] == 0
    code, found = as_json("verify", copy, "--model", model, "--n-ctx", 2048)
    assert code == 1
    assert found["beyond"] == 3


@pytest.mark.parametrize(("arch", "n_ctx"), [("llama", 100), ("mamba", 512), ("lfm2", 512)])
def test_verify_takes_snapshots_and_what_is_longer_than_the_context(arch, n_ctx, models, tmp_path, as_json):
    with caching(tmp_path / "kv", load(models(arch))) as cache:
        answer(cache.llm, prompt(300), 6)
    code, found = as_json("verify", tmp_path / "kv", "--model", models(arch), "--n-ctx", n_ctx)
    assert (code, found["beyond"], bool(found["sequences"])) == (0, 0, True)


@pytest.mark.slow
def test_evict_pin_and_unpin(store, as_json, run):
    keys = [page["page"] for page in as_json("tree", store)[1] if page["namespace"] == MINE.key.hex()]
    assert as_json("pin", store, keys[1])[1]["changed"] == 2
    code, found = as_json("evict", store, "--to", "1B", "--dry-run")
    assert (code, found["pages"], found["removed"]["pages"], found["policy"]) == (1, 2, 7, "lru")
    of_a_policy = ("--to", "0%", "--max-bytes", "1GiB", "--policy", "priority", "--dry-run")
    assert "7 pages would be evicted (policy priority)" in run("evict", store, *of_a_policy)[1]
    code, found = as_json("evict", store, "--to", "1B")
    assert (code, found["pages"], found["removed"]["pages"]) == (1, 2, 7)
    assert as_json("unpin", store, keys[1])[1]["changed"] == 2
    assert as_json("evict", store, "--to", "1B")[1]["pages"] == 0


def test_purged_pages_cannot_be_read_from_the_files(store, tmp_path, as_json):
    with Archive(store) as archive:
        payloads = {page.namespace: [] for page in archive.pages()}
        for record, _, payload in contents(archive.backend).values():
            payloads[record.namespace].append(payload)

    def readable(payload):
        files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        return any(payload[at : at + 16] in files for at in range(0, 1000 - 16, 16))

    assert all(map(readable, payloads[YOURS.key]))
    assert as_json("purge", store, "--salt", "yuors")[0] == 1
    code, found = as_json("purge", store, "--salt", "yours")
    assert (code, found["removed"]["pages"], found["scrubbed"]) == (0, 2, True)
    assert not any(map(readable, payloads[YOURS.key]))
    assert as_json("check", store)[0] == 0
    assert as_json("stats", store)[1]["pages"] == 7
    code, found = as_json("purge", store, "--everything")
    assert not any(map(readable, payloads[MINE.key]))
    assert as_json("stats", store)[1]["pages"] == 0


def test_a_conversation_is_purged_by_its_text(served, tmp_path, run, as_json):
    model, kv = served[0], str(tmp_path / "kv")
    llm, asked = load(model), ("--prefix", "Alice asks", "--model", model)
    with PrefixStore(kv, llm) as cache:
        llm.set_cache(cache)
        for text in (b"Alice asks for advice. ", b"Bob asks for advice. "):
            answer(llm, llm.tokenize(text * 60), 1)
    before = as_json("stats", kv)[1]["pages"]
    code, found = as_json("purge", kv, *asked)
    assert (code, as_json("stats", kv)[1]["pages"]) == (0, before - found["removed"]["pages"])
    assert 0 < found["removed"]["pages"] < before
    assert run("purge", kv, *asked)[0] == run("export", kv, "--out", tmp_path / "f", *asked)[0] == 1


# -- moving -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export_and_import_work_through_a_pipe(store, tmp_path, as_json):
    with process("export", store, "--out", "-") as one:
        command = [sys.executable, "-m", "prefixstore", "import", str(tmp_path / "other"), "-", "--json"]
        done = subprocess.run(command, cwd=ROOT, check=False, stdin=one.stdout, capture_output=True, text=True)
        assert "9 pages exported" in one.stderr.read()
    assert (done.returncode, json.loads(done.stdout)["pages"]) == (0, 9)
    assert as_json("check", tmp_path / "other")[0] == 0
