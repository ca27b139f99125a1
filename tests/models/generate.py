"""Writes a GGUF of an architecture, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from prefixstore.testing import models as vocabulary
from tests.models.architectures import Model
from tests.models.weights import Weights
from tests.support import PATIENCE, ROOT
from tests.support.models import finish

N_VOCAB = 4096
# scales of quantized weights: these have none
OPTIONAL = (".scale", ".input_scale")
# keys without the name of the architecture before them
GLOBAL = ("tokenizer.", "xielu.")


class CannotGenerateError(Exception):
    """llama.cpp does not take a model's metadata."""


def generate(model: Model, directory: Path, *, seed: int = 0) -> Path:
    """Write a model, unless it is there; its file has its name only once it is complete.

    Raises
    ------
    CannotGenerateError
        If llama.cpp does not take the metadata.
    """
    path = directory / f"{model.name}.gguf"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    own = directory / f".{uuid.uuid4().hex}"
    try:
        tensors = _tensors(model, own.with_suffix(".meta"), own.with_suffix(".json"))
        words = vocabulary._vocabulary(N_VOCAB)
        weights = Weights(model, words.words, "output.weight" not in tensors, np.random.default_rng(seed))
        writer = _writer(model, own)
        vocabulary._write_tokenizer(writer, gguf.TokenType, words, N_VOCAB)
        for name, shape in tensors.items():
            if not name.endswith(OPTIONAL) and not (model.without and model.without in name):
                writer.add_tensor(name, weights.values(name, shape))
        finish(writer)
        own.replace(path)
    finally:
        for left in directory.glob(f"{own.name}*"):
            left.unlink()
    return path


def _tensors(model: Model, metadata: Path, found: Path) -> dict[str, list[int]]:
    """What llama.cpp asks for."""
    writer = _writer(model, metadata)
    writer.add_tokenizer_model("no_vocab")
    finish(writer)
    command = [sys.executable, "-m", "tests.models.discover", str(metadata), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE)
    if not found.exists():
        lines = done.stderr.splitlines()
        told = [line for line in lines if "rror" in line or "ASSERT" in line or "failed" in line]
        raise CannotGenerateError(f"{model.name}: {' | '.join((told or lines)[-3:])}")
    return dict(json.loads(found.read_text()))


def _writer(model: Model, path: Path) -> Any:
    writer = gguf.GGUFWriter(path, model.arch)
    # of one named phi3 llama.cpp expects certain tokens
    writer.add_name("generated")
    writer.add_file_type(0)
    for key, value in ({"context_length": 32768, "vocab_size": N_VOCAB} | dict(model.metadata)).items():
        full = key if key.startswith(GLOBAL) else f"{model.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_uint32(full, value)
    return writer
