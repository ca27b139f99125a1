"""The prompt of a request and its tokens, or why it is passed through without the store.

The fields that are listed here are known to leave nothing in a slot but the rows of its tokens. A field of a newer
llama-server that switches on an adapter, moves rows or mixes in something else would not be on such a list. What a
field does to the *tokens* does no harm, since the server compares those itself. So the list has fields that say which
prompt is meant, how the next token is chosen, or how the answer is formatted; and those of other interfaces, which
llama-server ignores.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from prefixstore.format.keys import Tokens
from prefixstore.server.chats import chat_of_messages, chat_of_responses
from prefixstore.server.refused import RefusedError
from prefixstore.server.upstream import Headers, Upstream, UpstreamTimeoutError

T = TypeVar("T")

TOKENIZE_SECONDS = 30.0
# of the text of a token's number, about
TOKEN_CHARACTERS = 6
# Smaller inputs are read faster than a thread is asked.
LARGE = 64 << 10
# One: what JSON becomes in memory can be many times as large as its text, and only one such is made at a time.
_reader = ThreadPoolExecutor(1, thread_name_prefix="prefixstore-parse")
TEXT = frozenset({"/completion", "/completions", "/v1/completions"})
# the last one is that of Ollama, with which llama-server takes the same requests
CHAT = frozenset({"/chat/completions", "/v1/chat/completions", "/api/chat"})
MESSAGES = frozenset({"/v1/messages"})
RESPONSES = frozenset({"/responses", "/v1/responses"})
INFILL = "/infill"
# The paths of completions: all but the last gain the store.
ENDPOINTS = TEXT | CHAT | MESSAGES | RESPONSES | {INFILL}
# Requests with a body that use no slot. All others may put anything into any idle slot.
SLOTLESS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/api/show",
        "/props",
        "/v1/chat/completions/control",
        "/chat/completions/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/v1/streams/lookup",
        "/cors-proxy",
        "/tools",
    }
)
# Content of messages that is no text.
MEDIA = frozenset({"image", "image_url", "input_image", "input_audio", "audio", "audio_url", "video", "video_url"})
MEDIA |= {"input_video", "file", "input_file", "document"}
# Objects and lists of one request: reading more of them would hold up all others for longer than any prompt is worth.
MAX_PARTS = 100_000
# The reason of requests that bypass the store, since one of their fields is not known to be harmless.
UNKNOWN_FIELD = "unknown_field"
# All that a prompt may have beside images and sound if it is an object.
PROMPT_FIELDS = frozenset({"prompt_string", "multimodal_data"})
JSON_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# llama-server's own, from server-schema.cpp and server-common.cpp.
OF_LLAMA_SERVER = """
prompt messages input input_prefix input_suffix input_extra system instructions model user
stream stream_options verbose timings_per_token return_tokens return_progress response_fields sse_ping_interval
n_predict max_tokens max_completion_tokens max_output_tokens max_new_tokens n_indent n_keep n_discard
t_max_prompt_ms t_max_predict_ms n n_cmpl best_of id_slot cache_prompt
temperature top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p dynatemp_range dynatemp_exponent
repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed
n_probs logprobs top_logprobs min_keep backend_sampling post_sampling_probs samplers logit_bias ignore_eos stop
json_schema grammar grammar_type grammar_lazy grammar_triggers preserved_tokens response_format
chat_format chat_parser chat_template_kwargs reasoning_format generation_prompt parse_tool_calls echo
add_generation_prompt continue_final_message message_delimiters tools tool_choice parallel_tool_calls
reasoning_control reasoning_effort reasoning_budget_tokens thinking_budget_tokens reasoning_budget_start_tag
reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message
"""
# Of OpenAI's and Anthropic's interfaces, which their clients send.
OF_INTERFACES = """
audio background context_management conversation function_call functions include max_tool_calls metadata modalities
prediction previous_response_id prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
safety_identifier service_tier store suffix text truncation verbosity web_search_options
anthropic_beta anthropic_version betas cache_control container effort inference_geo mcp_servers output_config
output_format speed stop_sequences thinking
"""
# Of other servers: samplers, and what belongs to the client.
OF_CLIENTS = """
add_bos_token add_special_tokens allowed_token_ids api_server api_type bad_words ban_eos_token banned_strings
banned_tokens bos_token chat_id chat_template_args client_metadata custom_token_bans do_sample dynamic_temperature
dynatemp_high dynatemp_low early_stopping enable_thinking encoder_repetition_penalty epsilon_cutoff eta_cutoff format
grammar_string guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
include_reasoning include_stop_str_in_output keep_alive legacy_api length_penalty max_context_length max_length
max_tokens_second min_length min_tokens mirostat_mode models no_repeat_ngram_size nsigma num_batch num_beams num_ctx
num_gpu num_keep num_predict num_thread options penalize_nl penalty_alpha plugins priority prompt_logprobs provider
rep_pen rep_pen_range rep_pen_slope repetition_penalty repetition_penalty_range request_id return_token_ids
return_tokens_as_token_ids route sampler_order sampler_priority sampler_seed session_id skew skip_special_tokens
slot_id smoothing_curve smoothing_factor spaces_between_special_tokens stop_sequence stop_token_ids stopping_strings
structured_outputs temperature_last tfs tfs_z think thinking_budget thinking_token_budget title top_a transforms
truncation_length typ_p typical usage use_beam_search
"""
# Of vLLM: only requests with the same one share pages. llama-server ignores it.
CACHE_SALT = "cache_salt"
KNOWN_FIELDS = frozenset((OF_LLAMA_SERVER + OF_INTERFACES + OF_CLIENTS).split())
# What clients always send, and what a server that has guidance would take for none.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {"guidance_scale": (0, 1), "negative_prompt": ("",)}
# These have rules of their own.
JUDGED = frozenset({"lora", "n_cache_reuse"})


@dataclass(frozen=True)
class Ask:
    """A completion that a client requests: a prompt or a chat."""

    # why it is passed through without the store; None if the store is used
    reason: str | None = None
    # text, or tokens and texts, as /tokenize takes them
    prompt: str | list[Any] | None = None
    # JSON, as /apply-template takes it
    chat: bytes | None = None
    # a number below 0 that stands for its images and sound, if it has any
    media: int | None = None
    # the slot that the client wants; None if it leaves that to the server
    id_slot: int | None = None
    # whether the server uses the slot that the request names
    can_pin: bool = True
    # whether the rows that it leaves in a slot may be other than those of its tokens alone
    taints: bool = False
    # the one that is not known, if that is the reason
    field: str | None = None
    # whether the server reads what is added to it: that of an interface of which it takes all fields
    can_add: bool = True
    streams: bool = False
    # what the client adds to the name of its tenant
    cache_salt: str | None = None


async def aside(size: int, work: Callable[[], T]) -> T:
    """Do work on an input of this size, in a thread if it is large, so that other requests continue.

    The parser of JSON itself lets no other thread run; `parse` bounds how long that may take.
    """
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reader, work)


def parse(path: str, body: bytes, allowed: Collection[str] = ()) -> Ask:
    """Parse the body of a request to one of `ENDPOINTS`; `allowed` are further harmless fields.

    Raises
    ------
    RefusedError
        If it is refused. So is what the server may read otherwise, or that alone, as a byte order mark.
    """
    if _n_parts(body) > MAX_PARTS and _n_parts(JSON_TEXT.sub(b"", body)) > MAX_PARTS:
        raise RefusedError(f"the request has more than {MAX_PARTS:,} objects and lists")
    try:
        request = json.loads(body.decode())  # as text: bytes could be in another encoding
        if not isinstance(request, dict):
            raise RefusedError("the request must be a JSON object")
        ask = _of_messages(request) if path in MESSAGES else _of_others(path, request, body)
        field = unknown_field(request, allowed) or _unknown_of_prompt(path, request)
    except (ValueError, RecursionError):
        # what is nested deeply may be read, and not be written
        raise RefusedError("the request cannot be read: it must be a JSON object in UTF-8") from None
    salt = request.get(CACHE_SALT)
    if CACHE_SALT in allowed and salt is not None and not (isinstance(salt, str) and salt):
        raise RefusedError("cache_salt must be a text that is not empty")
    ask = replace(ask, streams=request.get("stream") is True, cache_salt=salt)
    return ask if field is None else replace(ask, reason=ask.reason or UNKNOWN_FIELD, taints=True, field=field)


def _unknown_of_prompt(path: str, request: dict[str, Any]) -> str | None:
    prompt = request.get("prompt") if path in TEXT else None
    parts = prompt if isinstance(prompt, list) else [prompt]
    return next((name for part in parts if isinstance(part, dict) for name in part if name not in PROMPT_FIELDS), None)


def _n_parts(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _of_messages(request: dict[str, Any]) -> Ask:
    # llama-server drops id_slot, lora and cache_prompt of these
    if _has_media(request.get("messages")):
        return Ask("media", can_pin=False, can_add=False)
    return Ask(chat=_dump(chat_of_messages(request)), can_pin=False, can_add=False)


def _of_others(path: str, request: dict[str, Any], body: bytes) -> Ask:
    id_slot = request.get("id_slot")
    if id_slot is None:
        id_slot = -1
    if not isinstance(id_slot, int) or isinstance(id_slot, bool) or id_slot < -1:
        raise RefusedError("id_slot must be the number of a slot, from 0, or -1 for any")
    wanted = None if id_slot == -1 else id_slot
    prompts = request.get("prompt") if path in TEXT else request.get("messages", request.get("input"))
    is_many, is_batch = _is_many(request), path in TEXT and _is_batch(prompts)
    reasons = (
        ("infill", path == INFILL),
        ("lora", bool(request.get("lora"))),
        ("media", path in RESPONSES and _has_media(prompts)),
        ("several_answers", is_many),
        ("several_prompts", is_batch),
        ("cache_prompt", request.get("cache_prompt") is False),
    )
    reason = next((reason for reason, holds in reasons if holds), None)
    if reason is not None:
        can_pin = not is_many and not is_batch
        return Ask(reason, id_slot=wanted, can_pin=can_pin, taints=bool(request.get("lora")))
    if path in TEXT:
        return _of_prompt(prompts, wanted)
    if path in CHAT:
        media = _taken_out(request)
        return Ask(chat=_dump(request) if media else body, media=_number(media), id_slot=wanted)
    return Ask(chat=_dump(chat_of_responses(request)), id_slot=wanted)


def _of_prompt(prompt: object, wanted: int | None) -> Ask:
    if isinstance(prompt, dict):
        text, media = prompt.get("prompt_string"), prompt.get("multimodal_data")
        if not isinstance(text, dict):
            return replace(_of_prompt(text, wanted), media=_number(media) if media else None)
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        return _of_prompt(prompt[0], wanted)
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_piece(piece) for piece in prompt)):
        return Ask(prompt=prompt, id_slot=wanted)
    raise RefusedError("the prompt must be text, or a list of tokens and texts")


def _is_many(request: dict[str, Any]) -> bool:
    return any(request.get(name) not in (None, 0, 1) for name in ("n", "n_cmpl", "best_of"))


def _is_piece(piece: object) -> bool:
    return isinstance(piece, (int, str)) and not isinstance(piece, bool)


def _is_batch(prompt: object) -> bool:
    """Whether the server takes it as several prompts: a list of more than one without a number in it."""
    return isinstance(prompt, list) and len(prompt) > 1 and not any(isinstance(piece, int) for piece in prompt)


def _has_media(value: object) -> bool:
    """Whether images, audio or other files are in a prompt, or in the messages of a chat."""
    return any(
        "multimodal_data" in part or (isinstance(part.get("type"), str) and part["type"] in MEDIA)
        for part in _dicts(value)
    )


def _taken_out(chat: dict[str, Any]) -> list[Any]:
    """The images and sound of a chat, with something short in their places: its template does not depend on them."""
    found: list[Any] = []
    for part in _dicts(chat.get("messages")):
        name = part.get("type")
        if isinstance(name, str) and name in MEDIA and name in part:
            found.append(part[name])
            part[name] = {"data" if name == "input_audio" else "url": "AA=="}
    return found


def _number(media: object) -> int | None:
    """A number that stands for images and sound: another one for others, most likely."""
    return -1 - (zlib.crc32(_dump(media)) >> 1) if media else None


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    """All objects in a value."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield one
            pending.extend(part for part in one.values() if isinstance(part, (dict, list)))
        elif isinstance(one, list):
            pending.extend(part for part in one if isinstance(part, (dict, list)))


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def pinned(body: bytes, **fields: int | bool) -> bytes:
    """The JSON object with these fields, its other bytes untouched. Of equal names the server takes the last."""
    end = body.rindex(b"}")
    separator = b"" if body[:end].rstrip().endswith(b"{") else b","
    return body[:end] + separator + json.dumps(fields)[1:-1].encode() + body[end:]


def unknown_field(request: Mapping[str, object], allowed: Collection[str] = ()) -> str | None:
    """The first field of a request that is not known to be harmless, nor `allowed`; None if there is none."""
    for name, value in request.items():
        # llama-server takes null for absent
        is_known = value is None or name in KNOWN_FIELDS or name in JUDGED or name in allowed
        if not is_known and value not in NEUTRAL_VALUES.get(name, ()):
            return name
    return None


# -- tokens, as the server itself makes them --------------------------------------------------------------------------


async def tokens_of_request(ask: Ask, upstream: Upstream, headers: Headers, marker: str | None) -> Tokens | None:
    """The tokens that the server will use; None if it refuses, as it will then refuse the request itself, or is late.

    Those before the first image, and then a number that stands for the rest. `headers` are what the client has sent to
    be let in, and `marker` stands for an image in a prompt of this server; None if that is not known.
    """
    if ask.media is not None and marker is None:
        return None
    prompt: object = ask.prompt
    if ask.chat is not None:
        answer = await _asked(upstream, "/apply-template", ask.chat, headers)
        prompt = answer.get("prompt") if answer else None
        if not isinstance(prompt, str):
            return None
    if ask.media is not None and marker and isinstance(prompt, str):
        prompt = prompt.partition(marker)[0]
    # as the server tokenizes the prompts of completions
    request = {"content": prompt, "add_special": True, "parse_special": True}
    size = len(prompt) if isinstance(prompt, (str, list)) else 0
    answer = await _asked(upstream, "/tokenize", await aside(size, lambda: _dump(request)), headers)
    listed = answer.get("tokens") if answer else None
    if not isinstance(listed, list):
        return None
    tokens = await aside(len(listed) * TOKEN_CHARACTERS, lambda: _array(listed))
    return tokens if tokens is None or ask.media is None else np.append(tokens, np.int32(ask.media))


async def _asked(upstream: Upstream, path: str, body: bytes, headers: Headers) -> dict[str, object] | None:
    try:
        reply = await upstream.ask(path, headers, body, timeout=TOKENIZE_SECONDS)
        answer = await aside(len(reply.content), reply.json) if reply.is_ok else None
    except (UpstreamTimeoutError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _array(listed: list[object]) -> Tokens | None:
    try:
        tokens = np.array(listed, np.int32)
    except (ValueError, TypeError, OverflowError):
        return None
    return tokens if tokens.ndim == 1 else None
