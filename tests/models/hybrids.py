"""Models that keep a state which grows with no token, alone or beside attention; and those that keep nothing."""

from __future__ import annotations

from tests.models.architectures import HEADS, LAYERS, WIDTH, Memory, Model, kv_heads, model, windowed

HYBRID, RECURRENT, NONE = Memory.HYBRID, Memory.RECURRENT, Memory.NONE
LAST = kv_heads(LAYERS, {3})
NO_ATTENTION = {"feed_forward_length": 0, "attention__head_count": 0}
LFM2 = {"block_count": 6, "attention__head_count_kv": kv_heads(6, {2, 5}), "shortconv__l_cache": 3}
NEMOTRON = {
    "block_count": 6,
    "attention__head_count_kv": kv_heads(6, {2}),
    "feed_forward_length": [0, WIDTH, 0, WIDTH, 0, WIDTH],
}

HYBRID_MODELS: tuple[Model, ...] = (
    model("qwen3next", HYBRID, "attention delta experts shared-ffn", "Qwen 3 Next, Qwen 3 Coder Next"),
    model("qwen35", HYBRID, "attention delta mrope", "Qwen 3.5"),
    model("qwen35moe", HYBRID, "attention delta mrope experts shared-ffn", "Qwen 3.5 MoE"),
    model("qwen35-mtp", HYBRID, "attention delta mrope mtp", "Qwen 3.5 with its MTP layer", arch="qwen35"),
    model("lfm2", HYBRID, known_as="LFM 2", **LFM2),
    model("lfm2moe", HYBRID, "attention experts", "LFM 2 8B A1B", **LFM2, leading_dense_block_count=2),
    model("granitehybrid", HYBRID, "attention mamba2", "Granite 4", attention__head_count_kv=LAST, logit_scale=1.0),
    model("nemotron_h", HYBRID, "attention mamba2", "Nemotron H, Nemotron Nano 2", **NEMOTRON),
    model(
        "nemotron_h_moe",
        HYBRID,
        "attention mamba2 experts shared-ffn",
        "Nemotron 3",
        **NEMOTRON,
        expert_shared_count=1,
    ),
    model("jamba", HYBRID, "attention mamba", "Jamba", attention__head_count_kv=LAST),
    model("falcon-h1", HYBRID, "attention mamba2", "Falcon H1"),
    model("kimi-linear", HYBRID, "attention mla experts shared kda", "Kimi Linear"),
    model(
        "kimi-k3",
        HYBRID,
        "attention mla experts shared kda",
        "Kimi K3",
        attn_res__block_size=2,
        activation__situ_beta=1.0,
        activation__situ_linear_beta=1.0,
    ),
    model("bailingmoe3", HYBRID, "attention mla experts shared kda", "Ling 3", kda__gate_lower_bound=-5.0),
    model(
        "minimax-01",
        HYBRID,
        "attention experts",
        "MiniMax 01 and M1",
        attention__recurrent_layers=windowed(LAYERS, 4),
        residual_scale=1.0,
    ),
    model(
        "plamo2",
        HYBRID,
        "attention mamba",
        "PLaMo 2",
        attention__head_count_kv=LAST,
        ssm__state_size=32,
        ssm__group_count=0,
    ),
    model(
        "lfm2-swa",
        Memory.HYBRID_WINDOW,
        known_as="LFM 2 with windows",
        arch="lfm2",
        **LFM2,
        attention__sliding_window=256,
    ),
    model(
        "qwen4exp",
        Memory.HYBRID_SPARSE,
        "attention delta mrope experts shared-ffn indexer hyper",
        "Qwen 4 preview",
        hyper_connection__low_rank=16,
    ),
    model(
        "glm5-next",
        Memory.HYBRID_SPARSE,
        "attention mla experts shared kda indexer hyper",
        "GLM 5.3 Flash",
        attention__indexer__kpool=4,
        attention__key_length=64,
        attention__key_length_mla=32,
        rope__dimension_count=0,
        hyper_connection__sinkhorn_iterations=4,
    ),
    model(
        "deepseek4",
        Memory.COMPRESSED,
        "attention experts shared indexer hyper",
        "DeepSeek 4",
        attention__head_count_kv=1,
        attention__key_length=64,
        attention__value_length=64,
        attention__q_lora_rank=64,
        expert_gating_func=4,
        attention__sliding_window=128,
        attention__output_group_count=2,
        attention__output_lora_rank=32,
        attention__compress_rope_freq_base=10000.0,
        attention__compress_ratios=[4, 128, 4, 128],
        hyper_connection__sinkhorn_iterations=4,
        hash_layer_count=1,
        swiglu_clamp_exp=7.0,
    ),
    model("mamba", RECURRENT, "attention mamba", "Mamba 1", **NO_ATTENTION),
    model("mamba2", RECURRENT, "attention mamba2", "Mamba 2, Codestral Mamba", **NO_ATTENTION),
    model("rwkv6", RECURRENT, "wkv wkv6", "RWKV 6"),
    model("rwkv7", RECURRENT, "wkv wkv7", "RWKV 7"),
    model("rwkv6qwen2", RECURRENT, "attention wkv wkv6", "QRWKV 6", token_shift_count=1, without="time_mix_first"),
    model("arwkv7", RECURRENT, "attention wkv wkv7", "ARWKV 7", token_shift_count=1),
)

NO_DECODERS: tuple[Model, ...] = (
    model(
        "bert",
        NONE,
        known_as="embeddings",
        attention__causal=False,
        pooling_type=1,
        tokenizer__ggml__token_type_count=2,
        context_length=4096,
        fails="it embeds, and generates nothing",
    ),
    model(
        "t5",
        NONE,
        known_as="T5",
        attention__head_count_kv=HEADS,
        attention__relative_buckets_count=32,
        decoder_start_token_id=0,
        fails="llama-cpp-python has no call for its encoder; llama.cpp aborts the process",
    ),
    model("llada", NONE, known_as="LLaDA", fails="it diffuses: no memory"),
    model("dream", NONE, known_as="Dream", fails="it diffuses: no memory"),
)
