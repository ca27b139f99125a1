"""Pages whose bytes are not what was written: no answer is computed with them, not even through masked attention.

Each case puts garbage under the key of a page, its record left as it is, and compares three answers with those of a
Llama without a store: the one that needs the page, the next one, and the one after a reset. Cells that were freed keep
their rows, and a row of NaN in a masked cell spoils an answer that has nothing to do with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import pytest

from prefixstore import PrefixStore
from prefixstore.format.codec import PACKINGS, decode
from tests.support.garbage import Case, Victim, rows_replaced
from tests.support.models import TORTURE_OF_LONG, forget, load, prompt

F16, F32 = llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_F32
BF16 = 30  # of ggml; llama-cpp-python does not name it
Q8, Q4 = llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0
# a value of each kind, repeated over all rows; in quantized rows it hits the scale of every block sooner or later
VALUES = {
    F32: {"nan": np.float32(np.nan), "inf": np.float32(np.inf), "denormal": np.uint32(1)},
    F16: {"nan": np.uint16(0x7E00), "inf": np.uint16(0x7C00), "denormal": np.uint16(1)},
    BF16: {"nan": np.uint16(0x7FC0), "inf": np.uint16(0x7F80), "denormal": np.uint16(1)},
}


class Setting(NamedTuple):
    """A model, its context, and where its pages are kept, and how."""

    arch: str
    scheme: str
    codec: str
    options: dict[str, Any]
    page_tokens: int = 32
    n_batch: int = 32

    @property
    def tokens(self) -> list[int]:
        """A prompt of a few pages and a tail."""
        return prompt(max(5 * self.page_tokens, 200) // 2 + 68)

    @property
    def name(self) -> str:
        return "-".join([self.arch, self.scheme, self.codec, *(f"{k}={v}" for k, v in self.options.items())])


FLASH = {"flash_attn": True}
# with these, a batch ends within a rejected page, and in a block of cells that flash attention multiplies as a whole
LONG = 128, 80
SETTINGS = [
    Setting("llama", "lmdb", "raw", {}),
    Setting("llama", "sqlite", "raw", FLASH, *LONG),
    Setting("llama", "memory", "raw", {"type_k": F32, "type_v": F32}),
    Setting("llama", "lmdb", "raw", {"type_k": BF16, "type_v": BF16}),
    Setting("llama", "lmdb", "raw", {**FLASH, "type_k": Q8, "type_v": Q8}, *LONG),
    Setting("llama", "memory", "raw", {"type_k": Q8}),
    Setting("llama", "lmdb", "raw", {**FLASH, "type_k": Q4, "type_v": Q4}, *LONG),
    Setting("llama", "memory", "planes", {}),
    Setting("llama", "sqlite", "zstd", {**FLASH, "type_k": Q8, "type_v": Q8}, *LONG),
    Setting("gemma3", "lmdb", "raw", {"swa_full": False}),
    Setting("gemma3", "memory", "raw", {**FLASH, "swa_full": True}),
    Setting("mamba", "lmdb", "raw", {}),
    Setting("lfm2", "memory", "raw", {}),
]


def cases(pages: dict[bytes, Any], setting: Setting, rng: np.random.Generator) -> Iterator[Case]:
    """Garbage for each page that has a state."""
    packing = PACKINGS[setting.codec]
    states = {key: bytes(decode(record, payload)) for key, (record, _, payload) in pages.items() if payload}
    kv_type = setting.options.get("type_k", F16)
    values = VALUES.get(kv_type, VALUES[F16])
    for key, state in states.items():
        payload = pages[key][2]
        other = next((pages[k][2] for k in states if k != key), payload[::-1])
        yield Case(key, "random bytes", rng.bytes(len(payload)))
        yield Case(key, "random rows", bytes(packing.pack(rows_replaced(state, None))))
        for name, value in values.items():
            yield Case(key, name, bytes(packing.pack(rows_replaced(state, value))))
        if setting.arch in ("mamba", "lfm2"):
            yield Case(key, "nan (f32)", bytes(packing.pack(rows_replaced(state, VALUES[F32]["nan"]))))
        yield Case(key, "another page", other)
        yield Case(key, "truncated", payload[: rng.integers(len(payload))])
        yield Case(key, "longer", payload + rng.bytes(64))
        yield Case(key, "gone", None)


def attack(setting: Setting, models, tmp_path, *, rounds: int) -> list[str]:
    """The answers that were wrong."""
    llm = load(models(setting.arch), **{"n_ctx": 512, "n_batch": setting.n_batch, **setting.options})
    place = {"lmdb": f"lmdb://{tmp_path / 'kv'}", "sqlite": f"sqlite:///{tmp_path / 'kv.db'}", "memory": "memory:"}
    n, wrong = 0, []
    with PrefixStore(
        place[setting.scheme],
        page_tokens=setting.page_tokens,
        min_tokens=16,
        codec=setting.codec,
        namespace="x",
        write_behind=False,
    ) as store:
        one = Victim(store, llm, setting.tokens)
        for seed in range(rounds):
            lives = 0, setting.page_tokens + 9 + seed
            garbage = itertools.product(cases(one.pages, setting, np.random.default_rng(seed)), lives)
            # prime to the number of kinds: a few of each kind, and a few for each page
            for case, live in itertools.islice(garbage, 0, None, 1 if TORTURE_OF_LONG > 1 else 13):
                n += 1
                wrong += one.run(case, live)
        # what is not garbage is still used
        one.put()
        forget(llm)
        before = store.stats()
        assert one.answer_to(one.tokens) == one.cold[0]
        after = store.stats()
        assert after.tokens_restored - before.tokens_restored > len(one.tokens) * 3 // 4
        assert after.unreadable == before.unreadable
        assert sum(after.unreadable.values()) >= n // 2
        assert "error" not in after.misses
    return wrong


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_no_answer_is_computed_with_garbage(setting, models, tmp_path):
    assert attack(setting, models, tmp_path, rounds=TORTURE_OF_LONG) == []
