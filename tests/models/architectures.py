"""The models of the matrix: for each its architecture, its metadata and the kind of memory that llama.cpp gives it.

llama.cpp itself says which tensors an architecture has (`discover`), so metadata are all that is written here. The
rows are in `attention`, `windows` and `hybrids`; this module has what they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

LAYERS, WIDTH, HEADS, HEADS_KV, HEAD_DIM = 4, 128, 4, 2, 32


class Memory(Enum):
    """The kinds of memory, by the classes of `llama_model::create_memory` and what decides about them."""

    ATTENTION = "attention"  # llama_kv_cache
    MROPE = "attention, M-RoPE"  # its cells have more than one position
    MLA = "latent attention"  # one K for all heads, no V
    WINDOW = "window"  # llama_kv_cache_iswa
    SPARSE = "sparse attention"  # llama_kv_cache_dsa: keys of an indexer beside
    SPARSE_WINDOW = "sparse attention and window"  # llama_kv_cache_dsa_iswa
    SPARSE_BLOCKS = "sparse attention by blocks"  # llama_kv_cache_msa
    COMPRESSED = "compressed attention"  # llama_kv_cache_dsv4
    HYBRID = "hybrid"  # llama_memory_hybrid
    HYBRID_WINDOW = "hybrid with window"  # llama_memory_hybrid_iswa
    HYBRID_SPARSE = "hybrid with sparse attention"  # llama_memory_hybrid_idx
    RECURRENT = "recurrent"  # llama_memory_recurrent
    NONE = "none"  # no memory: not a decoder

    @property
    def steps_back(self) -> bool:
        """Whether each prefix of what was computed can be used, not only where a snapshot was taken."""
        return self not in _SNAPSHOTS_ONLY


_SNAPSHOTS_ONLY = (Memory.COMPRESSED, Memory.HYBRID, Memory.HYBRID_WINDOW, Memory.HYBRID_SPARSE, Memory.RECURRENT)


@dataclass(frozen=True)
class Model:
    """A model to generate."""

    # of the row: the architecture, unless there are several models of it
    name: str
    arch: str
    memory: Memory
    # without the name of the architecture before each key
    metadata: Mapping[str, Any]
    # by its users
    known_as: str = ""
    # why it has no row: where llama.cpp itself fails, or what the model is instead of a decoder
    fails: str = ""
    # an optional tensor that it must not have
    without: str = ""
    # llama.cpp itself, without a store, gives other answers if the same prompt is computed in other batches
    is_unsteady: bool = False


def windowed(n: int, every: int) -> list[bool]:
    """Of `n` layers each has a window but every so-many-th."""
    return [(i + 1) % every != 0 for i in range(n)]


def kv_heads(n: int, attention: set[int], heads: int = HEADS_KV) -> list[int]:
    """Heads of K and V of `n` layers: those without attention have none."""
    return [heads if i in attention else 0 for i in range(n)]


ATTENTION: dict[str, Any] = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS_KV,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": 10000.0,
}

BLOCKS: dict[str, dict[str, Any]] = {
    "attention": ATTENTION,
    "experts": {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
        "expert_gating_func": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
    },
    "shared": {
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 64,
        "leading_dense_block_count": 1,
    },
    "shared-ffn": {"expert_shared_feed_forward_length": 64},
    "longrope": {"rope.scaling.original_context_length": 4096, "context_length": 131072},
    "mtp": {"block_count": LAYERS + 1, "nextn_predict_layers": 1},
    # every fourth layer attends to all, the others to a window
    "window": {"attention.sliding_window": 256},
    "pattern": {"attention.sliding_window_pattern": windowed(LAYERS, 4), "rope.freq_base_swa": 10000.0},
    "swa-heads": {"attention.key_length_swa": HEAD_DIM, "attention.value_length_swa": HEAD_DIM},
    "mrope": {"rope.dimension_sections": [4, 6, 6, 0]},  # half of the rotated dimensions
    "mamba": {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * WIDTH,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 8,
    },
    "mamba2": {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * WIDTH,
        "ssm.state_size": 32,
        "ssm.time_step_rank": 8,  # heads
        "ssm.group_count": 1,
    },
    "delta": {  # gated delta net: as many key heads as groups, value heads of state_size
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
        "full_attention_interval": 4,
    },
    # one head of latent attention in the last layer
    "kda": {"ssm.conv_kernel": 4, "kda.head_dim": 32, "attention.head_count_kv": kv_heads(LAYERS, {3}, 1)},
    "mla": {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 64,
        "attention.key_length": 64 + 32,
        "attention.value_length": 64,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 32,
    },
    "indexer": {
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 2048,
    },
    "wkv": {  # without attention: what rwkv has instead of heads
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": 64,
    },
    "wkv6": {"time_mix_extra_dim": 32, "time_decay_extra_dim": 64, "rescale_every_n_layers": 6},
    "wkv7": {
        "attention.decay_lora_rank": 16,
        "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 16,
        "attention.gate_lora_rank": 16,
    },
    "hyper": {"hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6},
}


def model(
    name: str, memory: Memory, blocks: str = "attention", known_as: str = "", *, arch: str = "", **further: Any
) -> Model:
    """A row: metadata of `BLOCKS` of these names (the later ones win), and further ones, with ``__`` for a dot."""
    metadata: dict[str, Any] = {}
    for block in blocks.split():
        metadata |= BLOCKS[block]
    fails, without = further.pop("fails", ""), further.pop("without", "")
    is_unsteady = further.pop("is_unsteady", False)
    metadata |= {key.replace("__", "."): value for key, value in further.items()}
    return Model(name, arch or name, memory, metadata, known_as, fails, without, is_unsteady)
