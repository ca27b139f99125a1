"""llama.cpp's state bytes, parsed, cut and joined, beside what llama.cpp itself makes of them."""

from __future__ import annotations

import itertools
import struct

import llama_cpp
import numpy as np
import pytest

from prefixstore import CorruptError
from prefixstore.buffers import BufferPool
from prefixstore.llama.kv_memory import page_tokens_for
from prefixstore.llama.paged_memory import PagedMemory
from prefixstore.llama.state.parse import parse_sequence
from prefixstore.llama.state.shape import SEQUENCE_0
from prefixstore.llama.state.view import Assembly
from tests.support.models import load, prompt, state_bytes, write

N = 700
SETTINGS = {
    "V transposed": {},
    "flash attention": {"flash_attn": True},
    "q8_0": {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
    "q8_0 K, V transposed": {"type_k": llama_cpp.GGML_TYPE_Q8_0},
}
CASES = list(itertools.product(["llama", "gemma3"], SETTINGS))


def context_bytes(llm) -> bytes:
    """All that a context holds, as a state of sequence 0: llama.cpp writes it after the name of the architecture."""
    state = llm.save_state().llama_state
    (length,) = struct.unpack_from("<I", state)
    return SEQUENCE_0 + state[4 + length :]


def joined(pieces, recurrent: bytes = b"") -> bytes:
    columns = zip(*(piece.positions for piece in pieces), strict=True)
    assembly = Assembly(pieces[0].shape, [np.concatenate(column) for column in columns], recurrent=recurrent)
    state = bytearray(assembly.size)
    assembly.write(memoryview(state), pieces)
    return bytes(state)


def again(parsed) -> bytes:
    """A state that was parsed, written again."""
    return joined([parsed], parsed.recurrent.data if parsed.recurrent else b"")


def pages_by_tagging(llm, n: int, page_tokens: int) -> list[tuple[int, int, bytes]]:
    """What an attached store takes out of the context."""
    buffers, pages = BufferPool(1 << 30), []
    ranges = [(start, min(start + page_tokens, n)) for start in range(0, n, page_tokens)]
    PagedMemory(llm).take(
        ranges, buffers.acquire, lambda start, end, buffer: pages.append((start, end, bytes(buffer.view)))
    )
    assert [page[:2] for page in pages] == ranges
    return pages


# -- beside llama.cpp -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "setting"), CASES)
def test_a_page_cut_out_of_a_context_is_the_page_that_tagging_takes(llama, arch, setting):
    llm = llama(arch, n_ctx=1024, **SETTINGS[setting])
    llm.eval(prompt(N))
    parsed = parse_sequence(context_bytes(llm))
    assert parsed.recurrent is None
    assert parsed.holds(0, N)
    assert not parsed.holds(0, N + 1)
    for start, end, page in pages_by_tagging(llm, N, page_tokens_for(llm, 128)):
        assert joined([parsed.cut(start, end)]) == page
        # in the middle of a page as well
        middle = parse_sequence(page).cut(start, end - 30)
        assert joined([middle]) == joined([parsed.cut(start, end - 30)])


@pytest.mark.parametrize(("arch", "setting"), CASES)
def test_pages_joined_are_the_state_that_was_cut(llama, arch, setting):
    llm = llama(arch, n_ctx=1024, **SETTINGS[setting])
    llm.eval(prompt(N))
    pages = [parse_sequence(page) for _, _, page in pages_by_tagging(llm, N, 128)]
    assert joined(pages) == context_bytes(llm)
    window_from = max(N - 256, 0) if arch == "gemma3" else 0
    # as llama.cpp writes a sequence, without the rows that no later token can see
    pieces = [page.cut(i * 128, N, window_from=window_from) for i, page in enumerate(pages)]
    assert joined(pieces) == state_bytes(llm)


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_a_recurrent_part_is_identified_by_its_position_and_kept_unchanged(llama, arch):
    llm = llama(arch, n_ctx=1024)
    assert parse_sequence(state_bytes(llm)).recurrent.position == -1
    llm.eval(prompt(N))
    state = state_bytes(llm)
    parsed = parse_sequence(state)
    assert parsed.recurrent.position == N - 1
    assert len(parsed.sections) == (arch == "lfm2")
    assert parsed.holds(0, N)
    # the attention of a hybrid model in pieces, and the recurrent part once
    assert joined([parsed.cut(0, 256), parsed.cut(256, N)], parsed.recurrent.data) == state


# -- any bytes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> list[bytes]:
    """Small states of every kind."""
    directory, found = tmp_path_factory.mktemp("models"), []
    for arch in ("llama", "gemma3", "mamba", "lfm2"):
        for flash_attn in (False, True):
            llm = load(write(directory, arch), n_ctx=256, flash_attn=flash_attn)
            llm.eval(prompt(5))
            found.append(state_bytes(llm))
    return found


def test_states_are_written_again_as_they_were(states):
    for state in states:
        assert again(parse_sequence(state)) == state


def test_a_state_that_is_truncated_or_has_extra_bytes_is_refused(states):
    for state in states:
        for end in {*range(0, len(state), 97), len(state) - 1}:
            with pytest.raises(CorruptError):
                parse_sequence(state[:end])
        with pytest.raises(CorruptError):
            parse_sequence(state + b"\0")


def cells(*found: tuple[int, ...]) -> bytes:
    """A state with one layer of one byte for these cells: positions, number of sequences, sequences."""
    body = b"".join(struct.pack(f"<{len(cell)}i", *cell) for cell in found)
    rows = struct.pack("<iQ", 1, 1) + bytes(range(len(found)))
    return SEQUENCE_0 + struct.pack("<II", 1, len(found)) + body + struct.pack("<II", 0, 1) + rows + rows


def test_only_cells_of_sequence_0_alone_can_be_cut():
    assert parse_sequence(cells((0, 1, 0), (1, 1, 0))).holds(0, 2)
    for other in [
        cells((0, 1, 1)),  # of another sequence
        cells((0, 2, 0, 1), (1, 1, 0)),  # of two
        cells((0, 0), (1, 0)),  # of none
        cells((-1, 1, 0)),
        cells((3, 1, 0), (3, 1, 0)),
    ]:
        with pytest.raises(CorruptError):
            parse_sequence(other)
