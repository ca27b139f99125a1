"""A tiny vision encoder with random weights (``--mmproj``), and pictures for it."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

from tests.support.models import finish

WIDTH, HIDDEN, PATCH, SIZE, LAYERS = 32, 64, 14, 56, 1


def write_projector(path: Path, n_embd: int) -> Path:
    """Write the projector of a model with embeddings of this length: a picture becomes 16 of them (LLaVA's)."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": SIZE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": HIDDEN}
    numbers |= {"projection_dim": n_embd, "block_count": LAYERS, "attention.head_count": 2}
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name, number in (("mean", 0.5), ("std", 0.25)):
        writer.add_array(f"clip.vision.image_{name}", [number] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": ((SIZE // PATCH) ** 2, WIDTH),
        "mm.0.weight": (n_embd, WIDTH),
        "mm.0.bias": (n_embd,),
        "mm.2.weight": (n_embd, n_embd),
        "mm.2.bias": (n_embd,),
    }
    for layer in range(LAYERS):
        block = f"v.blk.{layer}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{block}{part}.weight": (WIDTH, WIDTH), f"{block}{part}.bias": (WIDTH,)}
        shapes |= {f"{block}ffn_up.weight": (HIDDEN, WIDTH), f"{block}ffn_up.bias": (HIDDEN,)}
        shapes |= {f"{block}ffn_down.weight": (WIDTH, HIDDEN), f"{block}ffn_down.bias": (WIDTH,)}
        for part in ("ln1", "ln2"):
            shapes |= {f"{block}{part}.weight": (WIDTH,), f"{block}{part}.bias": (WIDTH,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))
    finish(writer)
    return path


def picture(seed: int) -> str:
    """A PNG of random colors, in Base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + png).decode()
