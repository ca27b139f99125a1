"""All models of the matrix, by name."""

from __future__ import annotations

from tests.models.architectures import Memory, Model
from tests.models.attention import ATTENTION_MODELS
from tests.models.hybrids import HYBRID_MODELS, NO_DECODERS
from tests.models.windows import WINDOW_MODELS

MODELS: dict[str, Model] = {
    model.name: model for model in (*ATTENTION_MODELS, *WINDOW_MODELS, *HYBRID_MODELS, *NO_DECODERS)
}

DECODERS: dict[str, Model] = {name: model for name, model in MODELS.items() if not model.fails}

# the one of each kind of memory that is tried with all settings
OF_EACH_KIND: dict[Memory, str] = {
    Memory.ATTENTION: "llama",
    Memory.MROPE: "qwen3vl",
    Memory.MLA: "deepseek2",
    Memory.WINDOW: "gpt-oss",
    Memory.SPARSE: "deepseek32",
    Memory.SPARSE_WINDOW: "dots3note",
    Memory.SPARSE_BLOCKS: "minimax-m3",
    Memory.COMPRESSED: "deepseek4",
    Memory.HYBRID: "qwen35",
    Memory.HYBRID_WINDOW: "lfm2-swa",
    Memory.HYBRID_SPARSE: "qwen4exp",
    Memory.RECURRENT: "mamba2",
}
