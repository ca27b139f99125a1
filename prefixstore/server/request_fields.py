"""The fields of completions that are known to leave nothing in a slot but the rows of its tokens.

It lists what is known to be harmless, not what is known to do harm: a field of a newer llama-server that
switches on an adapter, moves rows or mixes in something else would not be on such a list. What a field does to the
*tokens* does no harm, since the server compares those itself. So the list has fields that say which prompt is meant,
how the next token is chosen, or how the answer is formatted; and those of other interfaces, which llama-server ignores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["KNOWN_FIELDS", "OWN_FIELD", "unknown_field"]

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
# Of this proxy: llama-server ignores it.
OWN_FIELD = "prefixstore"
KNOWN_FIELDS = frozenset((OF_LLAMA_SERVER + OF_INTERFACES + OF_CLIENTS).split()) | {OWN_FIELD}
# What clients always send, and what a server that has guidance would take for none.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {"guidance_scale": (0, 1), "negative_prompt": ("",)}
# These have rules of their own.
JUDGED = frozenset({"lora", "n_cache_reuse"})


def unknown_field(request: Mapping[str, object], allowed: Collection[str] = ()) -> str | None:
    """The first field of a request that is not known to be harmless; None if there is none.

    Parameters
    ----------
    request
        The request.
    allowed
        Fields that the operator knows to be harmless.
    """
    for name, value in request.items():
        # llama-server takes null for absent
        is_known = value is None or name in KNOWN_FIELDS or name in JUDGED or name in allowed
        if not is_known and value not in NEUTRAL_VALUES.get(name, ()):
            return name
    return None
