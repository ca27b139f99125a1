"""The arguments and options of all commands: what each takes, and its help."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from prefixstore.engine.eviction import POLICIES
from prefixstore.units import parse_bytes

CONFIG_VARIABLE = "PREFIXSTORE_CONFIG"
# the second is llama-server's own
SERVER_KEYS = ("PREFIXSTORE_SERVER_KEY", "LLAMA_API_KEY")
# what stands for a store that is left out
OTHERWISE = "by default PREFIXSTORE_LOCATION, then that of --config, then ~/.cache/prefixstore/kv."
ANY_STORE = f"lmdb:///path (or a path), sqlite:////path, …; {OTHERWISE}"

# By the name of the parameter, in one command or module if that comes before it: the metavar, and the help. A flag has
# no metavar.
HELP = {
    # what many commands have
    **dict.fromkeys(("location", "source", "slots.store", "shim.store"), ("STORE", ANY_STORE)),
    "store": ("STORE", "lmdb:///path, sqlite:////path, …; a second one is the far location."),
    "target": ("TARGET", "Another store; it is created if it does not exist."),
    "digits": ("HASH", "The key of a page, or its first digits."),
    "as_json": ("", "Print one JSON document to stdout."),
    "limit": ("N", "Show at most N."),
    "max_bytes": ("SIZE", "Size limit of the store, such as 20GiB."),
    "model": ("FILE", "Model file (GGUF)."),
    "n_ctx": ("N", "Length of the context in tokens; llama.cpp rounds it up to a multiple of 256."),
    "config": ("FILE", "TOML file with [model], [store] and [warm], shared with servers; prefixstore init writes one."),
    "salt": ("TENANT", "Tenant: pages are shared only within one tenant."),
    "prompt": ("PROMPT", "The text of the prompt."),
    "prompt_file": ("FILE", "The text of the prompt; - is stdin."),
    "messages": ("FILE", 'A chat as JSON: a list of messages, or a request with "messages" and "tools"; - is stdin.'),
    "dry_run": ("", "Show what would be done without changing anything."),
    "yes": ("", "Do not ask. Scripts are never asked, and need --yes only to delete without STORE or --config."),
    **{f"{name}.yes": ("", "Replace a file without asking.") for name in ("init", "export", "report")},
    # which pages
    "namespace": ("NAME", "Only pages of one namespace: its label, or the first digits of its key."),
    "purge.salt": ("TENANT", "Only pages of one tenant, of all models."),
    **{f"{name}.salt": ("TENANT", "Only pages of one tenant.") for name in ("ls", "tree", "export", "copy")},
    "older_than": ("AGE", "Only pages not used for this long: 30d, 12h."),
    "purge.page": ("HASH", "Only one page and its descendants."),
    "export.page": ("HASH", "Only one page, with its ancestors and descendants."),
    "prefix": ("TEXT", "Only sequences that begin with this text; needs --model."),
    "containing": ("TEXT", "Only sequences that contain this text; needs --model."),
    "pinned": ("", "Only branches with pinned pages."),
    "everything": ("", "All pages of the store."),
    # use
    "init.file": ("FILE", "The file to write."),
    "prompts": (
        "PROMPTS",
        "JSONL files with prompt, messages or tokens in each line; text files; folders; - is stdin.",
    ),
    "for_server": ("", "Settings that are not given are those of llama-server, not of a Llama."),
    "threads": ("N", "Number of threads."),
    "batch": ("N", "Tokens evaluated at once."),
    "type_k": ("TYPE", "Type of K in the cache: f16, q8_0, …"),
    "type_v": ("TYPE", "Type of V in the cache; q8_0 and the like need --flash-attn."),
    "flash_attn": ("", "Flash attention."),
    "swa_full": ("", "Keep all rows of sliding-window layers."),
    "gpu_layers": ("N", "Layers on the GPU; -1 for all."),
    "lora": ("FILE", "LoRA adapter."),
    "chat_format": ("NAME", "Chat format to use instead of the model's template."),
    "generation_prompt": ("", "End messages where the assistant answers, or (the default) where the next turn begins."),
    "warm.namespace": ("NAME", "Label of the namespace; separates pages, as --salt does."),
    "page_tokens": ("N", "Tokens in a page; by default 256."),
    "ttl": ("AGE", "Time to live after the last use: 30d."),
    "quota": ("SIZE", "Size limit of one tenant, who evicts its own pages first: 2GiB."),
    "on_damage": ("aside|without|fail", "If the store cannot be opened: move its files aside, do without, or fail."),
    "api_key_file": ("FILE", "Only the tenants of these API keys, one in each line; - is stdin."),
    "priority": ("N", "Priority, for stores with the eviction policy 'priority'; lower is evicted first."),
    "pin": ("", "Keep the prompts from eviction."),
    "warm.dry_run": ("", "Show what would be computed without storing anything."),
    "far": ("STORE", "A far location, shared with other machines, such as s3://…"),
    "far_max_bytes": ("SIZE", "Size limit of the far location; by default that of the store."),
    "serve.command": ("-- COMMAND", "The llama-server to start; with --model, options of llama_cpp.server."),
    "serve.model": ("FILE", "Serve this model with llama-cpp-python's server, without llama-server."),
    "host": ("ADDRESS", "Address to listen on."),
    "port": ("N", "Port to listen on; 0: any that is free."),
    "server": ("URL", "URL of the server: http://127.0.0.1:8080."),
    "explain.server": ("URL", "A running llama-server, for the tokens of the prompt: http://127.0.0.1:8080."),
    "directory": ("DIR", "Where the program is written, which must not have one of this name."),
    "llama_server": ("FILE", "The llama-server to start; by default the one on the PATH."),
    "slots_dir": ("DIR", "The server's --slot-save-path."),
    "api_key": ("KEY", f"Key of the server; by default {SERVER_KEYS[0]} in the environment."),
    "admin_key": ("KEY", "The key for /prefixstore/status and /metrics."),
    "salt_from": ("api-key|header:NAME", "Separate tenants by their API key or a header."),
    "max_body": ("SIZE", "Size limit of a request."),
    "max_bodies": ("SIZE", "Size limit of all requests together; by default 16 times --max-body."),
    "max_waiting": ("N", "Requests that may wait for a slot; further ones get 503."),
    "allow_field": ("NAME", "A request field unknown to prefixstore that affects only sampling; can be repeated."),
    "serve.timeout": ("S", "Seconds to wait for the next byte of the server."),
    "timeout": ("SECONDS", "Timeout of a request in seconds."),
    "slot": ("N", "Number of the slot."),
    "every": ("", "All slots that are idle."),
    # look
    "once": ("", "Print it once and exit (the default without a terminal)."),
    "top.seconds": ("S", "Seconds between refreshes."),
    "sort": ("ORDER", "used, pages, tokens, stored or uses."),
    "depth": ("N", "Show N levels of branches."),
    "next_turn": ("", "End messages at the start of the next user turn, not where the assistant answers."),
    "report.out": ("FILE", "The page to write."),
    # maintain
    "repair": ("", "Delete damaged pages and their descendants, and rebuild a wrong index."),
    "sample": ("N", "Number of sequences to compare."),
    "seed": ("N", "Seed for choosing the sequences."),
    "bound": ("SHARE", "Largest allowed difference, as a share of the logits' range."),
    "to": ("SIZE", "Size to shrink the store to, such as 10GiB; with --max-bytes also 80%."),
    "evict.policy": ("NAME", f"Order of eviction: one of {', '.join(POLICIES)}; by default the store's own."),
    "scrub": ("", "Overwrite the deleted bytes."),
    "trace.file": ("TRACE", "JSON lines with hash_ids, plain or gzip."),
    "trace.policy": ("NAME", f"One of {', '.join(POLICIES)}; can be repeated."),
    "pages": ("N", "The budget in pages."),
    "requests": ("N", "Only the first N requests."),
    "key_file": ("FILE", "A file of keys."),
    "add.tenant": ("TENANT", "Add the key of one tenant, without which what it stores cannot be read."),
    "tenant": ("TENANT", "The name of the tenant, as tenants lists it."),
    # move
    "from_key": ("KEY", "file:PATH of the keys of STORE; none: not encrypted. By default PREFIXSTORE_KEY."),
    "import.from_key": ("KEY", "file:PATH of the keys of FILE; by default PREFIXSTORE_KEY."),
    "to_key": ("KEY", "The same for TARGET."),
    "export.out": ("FILE", "The file to write, such as f.pstore; - is stdout."),
    "file": ("FILE", "A file written by export; - is stdin."),
    "migrate.check": ("", "Only report whether the schema is up to date."),
}
# names that are not those of the parameters
NAMES = {
    "as_json": ["--json"],
    "every": ["--all"],
    "generation_prompt": ["--generation-prompt/--next-turn"],
    "report.yes": ["--yes", "-y", "--force"],
    "yes": ["--yes", "-y"],
}
MORE: dict[str, dict[str, Any]] = {
    "admin_key": {"envvar": "PREFIXSTORE_ADMIN_KEY"},
    "config": {"envvar": CONFIG_VARIABLE},
    "bound": {"min": 0.0},
    "port": {"min": 0, "max": 65535},
    "max_waiting": {"min": 0},
    "top.seconds": {"min": 0.1},
    **{name: {"min": 1} for name in ("depth", "init.n_ctx", "limit", "pages", "requests", "sample", "serve.timeout")},
}


def with_help(command: Callable[..., object], parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter of a command as the argument or option that the tables above describe."""
    name = parameter.name
    keys = [f"{command.__name__.rstrip('_')}.{name}", f"{command.__module__.rpartition('.')[2]}.{name}", name]
    metavar, text = next(HELP[key] for key in keys if key in HELP)
    more = next((MORE[key] for key in keys if key in MORE), {})
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        kind = typer.Argument(metavar=metavar, help=text, show_default=name not in ("location", "source"))
    else:
        # without a name, a flag would have its opposite too
        names = next(
            (NAMES[key] for key in keys if key in NAMES),
            [f"--{name.replace('_', '-')}"] if parameter.default is False else [],
        )
        kind = typer.Option(*names, metavar=metavar or None, help=text, **more)
    return parameter.replace(annotation=Annotated[parameter.annotation, kind])


def server_key(given: str | None) -> str | None:
    """The key of a llama-server: as given, or from the environment."""
    return next(filter(None, [given, *map(os.environ.get, SERVER_KEYS)]), None)


def max_bytes_of(size: str | None, name: str = "--max-bytes") -> int | None:
    """The bytes of ``--max-bytes``; None if it is not given."""
    return parse_bytes(size, name) if size is not None else None
