"""The arguments of a llama-server: which of them change its states, and which say that nothing can be stored.

Only what is known not to change a state is left out. An option that is not in these tables, of a newer server, is kept
as it was given, so it can at most give the server a namespace of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Options with one value that change no state, and some that name the model: its content is in the namespace. A draft
# proposes tokens, and the rows of the model are those of the tokens that it has taken.
VALUED = """
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb
--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -n --predict --n-predict -b --batch-size -ub
--ubatch-size --keep -dt --defrag-thold --rpc -lm --load-mode -lzm --lazy-mode --numa -dev --device -ot
--override-tensor -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts
--tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx -mu --model-url -dr
--docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token --log-file --log-colors -lv --verbosity
--log-verbosity --samplers -s --seed --sampler-seq --sampling-seq --temp --temperature --top-k --top-p --min-p
--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty
--presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n
--dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr
--mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file -ctxcp
--ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -r --reverse-prompt -mm --mmproj -mmu
--mmproj-url -mmdev --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir -a --alias --tags --embd-normalize --host --port --path --cors-origins
--cors-methods --cors-headers --api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --tools
--tools-runtime --mcp-servers-config --mcp-servers-json --api-key --api-key-file --ssl-key-file --ssl-cert-file
--chat-template-kwargs -to --timeout --sse-ping-interval --threads-http --media-path
--reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message --chat-template
--chat-template-file -sps --slot-prompt-similarity --sleep-idle-seconds --log-prompts-dir
--slot-save-path
--spec-type --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-model -md --model-draft --spec-draft-type-k -ctkd
--cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft --spec-draft-threads -td --threads-draft
--spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max --spec-draft-n-min
--spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min --spec-draft-device -devd --device-draft
--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
""".split()  # noqa: SIM905 - to be read beside the help of llama-server

# Options without a value that change no state.
FLAGS = """
--perf --no-perf -e --escape --no-escape -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host
-cmoe --cpu-moe --check-tensors --op-offload --no-op-offload --log-disable --log-jsonl --no-log-jsonl -v --verbose
--log-verbose --offline --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --ignore-eos -bs
--backend-sampling --cache-idle-slots --no-cache-idle-slots --no-context-shift -sp --special --warmup --no-warmup
--spm-infill -cb --cont-batching -nocb --no-cont-batching --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload
--no-mmproj-offload --reuse-port --cors-credentials --no-cors-credentials --ui-mcp-proxy --webui-mcp-proxy
--no-ui-mcp-proxy --no-webui-mcp-proxy -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui --cache-prompt
--no-cache-prompt --metrics --props --slots --no-slots --jinja --no-jinja --reasoning-preserve --no-reasoning-preserve
--skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant
--spec-default --spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-backend-sampling
--no-spec-draft-backend-sampling
""".split()  # noqa: SIM905 - as above

# What is understood: the setting, its options, its variable (without LLAMA_ARG_), and whether it has no value. The
# settings are in the order of llama-server's own list: of two variables for one, that of the later one counts.
UNDERSTOOD: tuple[tuple[str, str, str | None, bool], ...] = (
    ("n_ctx", "-c --ctx-size", "CTX_SIZE", False),
    ("n_parallel", "-np --parallel", "N_PARALLEL", False),
    ("kv_unified", "-kvu --kv-unified", "KV_UNIFIED", True),
    ("no_kv_unified", "-no-kvu --no-kv-unified", None, True),
    ("flash_attn", "-fa --flash-attn", "FLASH_ATTN", False),
    ("type_k", "-ctk --cache-type-k", "CACHE_TYPE_K", False),
    ("type_v", "-ctv --cache-type-v", "CACHE_TYPE_V", False),
    ("swa_full", "--swa-full", "SWA_FULL", True),
    ("rope_scaling", "--rope-scaling", "ROPE_SCALING_TYPE", False),
    ("rope_scale", "--rope-scale", "ROPE_SCALE", False),
    ("rope_freq_base", "--rope-freq-base", "ROPE_FREQ_BASE", False),
    ("rope_freq_scale", "--rope-freq-scale", "ROPE_FREQ_SCALE", False),
    ("yarn_orig_ctx", "--yarn-orig-ctx", "YARN_ORIG_CTX", False),
    ("yarn_ext_factor", "--yarn-ext-factor", "YARN_EXT_FACTOR", False),
    ("yarn_attn_factor", "--yarn-attn-factor", "YARN_ATTN_FACTOR", False),
    ("yarn_beta_slow", "--yarn-beta-slow", "YARN_BETA_SLOW", False),
    ("yarn_beta_fast", "--yarn-beta-fast", "YARN_BETA_FAST", False),
    ("override_kv", "--override-kv", None, False),
    ("context_shift", "--context-shift", "CONTEXT_SHIFT", True),
    ("cache_reuse", "--cache-reuse", "CACHE_REUSE", False),
    ("model", "-m --model", "MODEL", False),
    ("cache_ram", "-cram --cache-ram", "CACHE_RAM", False),
)
# by option: the setting, and how many values it has
KNOWN = {name: (setting, 0 if is_flag else 1) for setting, names, _, is_flag in UNDERSTOOD for name in names.split()}
# by variable: an option
VARIABLES = {f"LLAMA_ARG_{variable}": names.split()[0] for _, names, variable, _ in UNDERSTOOD if variable is not None}
ORDER = {name: i for i, name in enumerate(VARIABLES)}

# Options with which nothing is stored, by how they begin, and the reason.
REFUSED = (
    ("--lora", "lora"),
    ("--control-vector", "control_vector"),
    ("--fim-qwen-", "preset"),
    ("--gpt-oss-", "preset"),
    ("--vision-gemma-", "preset"),
    ("--embd-gemma-", "preset"),
    ("--embedding", "embeddings"),
    ("--rerank", "embeddings"),
    ("--models-", "router"),
)

# Variables that change no state, and are not named like an option that changes none, as LLAMA_ARG_TOP_K is.
OTHER_VARIABLES = """
BATCH UBATCH CHECKPOINT_MIN_SPACING_NT STATIC_PATH ENDPOINT_METRICS ENDPOINT_PROPS ENDPOINT_SLOTS THINK THINK_BUDGET
THINK_BUDGET_MESSAGE SPEC_DRAFT_HF_REPO SPEC_DRAFT_CACHE_TYPE_K SPEC_DRAFT_CACHE_TYPE_V
""".split()  # noqa: SIM905 - as above
VARIABLE = re.compile(r"LLAMA_ARG_(NO_)?(\w+)")
# not of an option: rotates K and V before they are quantized
ROTATION = "LLAMA_ATTN_ROT_DISABLE"
CONFIG_FILE = "llama.cpp/config.ini"
TRUE = ("on", "enabled", "true", "1")


@dataclass
class Arguments:
    """The options of a server, from its arguments and environment."""

    # values of the options that are understood, by name; "1" for a flag
    settings: dict[str, str] = field(default_factory=dict)
    # the rest, as given
    unknown: list[str] = field(default_factory=list)
    # why nothing may be stored of a server with these; None if something may
    reason: str | None = None

    def is_on(self, name: str) -> bool:
        """Whether a flag is set."""
        return self.settings.get(name) == "1"


def config_files(environ: Mapping[str, str]) -> list[Path]:
    """The files of settings that llama-server reads before its arguments, as far as they exist."""
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/")) / ".config")
    return [path for place in ("/etc", home) if (path := Path(place) / CONFIG_FILE).exists()]


def option_name(argument: str) -> str:
    """The usual name of an option: llama-server also accepts ``--api_key``."""
    return argument.replace("_", "-") if argument.startswith("--") else argument


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """The options in the arguments of a llama-server, after its name, and in its environment; arguments come first."""
    found = Arguments()
    left = iter([*_as_arguments(environ), *argv])
    for given in left:
        name = option_name(given)
        reason = next((reason for prefix, reason in REFUSED if name.startswith(prefix)), None)
        if reason is not None:
            found.reason = found.reason or reason
        if name in KNOWN:
            setting, n_values = KNOWN[name]
            value = next(left, "") if n_values else "1"
            if setting == "no_kv_unified":
                setting, value = "kv_unified", "0"
            _set(found, setting, value)
        elif name in VALUED_NAMES:
            next(left, "")
        elif name not in FLAG_NAMES:
            found.unknown.append(given)
    return found


VALUED_NAMES, FLAG_NAMES = set(VALUED), set(FLAGS)
HARMLESS = VALUED_NAMES | FLAG_NAMES
REFUSED_NAMES = tuple(name for name, _ in REFUSED)


def _set(found: Arguments, setting: str, value: str) -> None:
    if setting == "override_kv" and setting in found.settings:
        value = f"{found.settings[setting]},{value}"
    found.settings[setting] = value
    # the last one counts: both give the same setting
    for one, other in (("rope_scale", "rope_freq_scale"), ("rope_freq_scale", "rope_scale")):
        if setting == one:
            found.settings.pop(other, None)


def _as_arguments(environ: Mapping[str, str]) -> Iterator[str]:
    """What the environment sets, as arguments; a variable that is not known is written as it is."""
    # of two variables for one setting, the one whose option stands last in llama-server's own list counts
    for name in sorted(environ, key=lambda name: (ORDER.get(name, 0), name)):
        value, match = environ[name], VARIABLE.fullmatch(name)
        if match is not None and match[2] not in OTHER_VARIABLES:
            is_negated, base = bool(match[1]), match[2]
            option, words = VARIABLES.get(f"LLAMA_ARG_{base}"), base.lower().replace("_", "-")
            if option is not None and KNOWN[option][1] == 0:
                # the negated name counts, whatever its value is
                if not is_negated and f"LLAMA_ARG_NO_{base}" not in environ and value.lower() in TRUE:
                    yield option
            elif option is not None and not is_negated:
                yield from (option, value)
            elif f"--{words}".startswith(REFUSED_NAMES):
                yield f"--{words}"
            elif f"--{words}" not in HARMLESS and not (is_negated and f"--no-{words}" in HARMLESS):
                yield f"{name}={value}"
        elif name == ROTATION:
            yield f"{name}={value}"


def values_of(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values given to an option, in order."""
    return [argv[i + 1] for i, argument in enumerate(argv[:-1]) if option_name(argument) in names]
