"""How states get out of a live ``llama_cpp.Llama`` and back into it.

A prompt becomes a restore. ``Llama.create_completion`` asks its cache, which is the store (`attached`), and the store
finds the `hook` of this ``Llama``, or attaches one. The hook asks the `context` whether it may be used, and the
`lineage` which tokens it is known to hold. Then a `strategy` takes the prompt: `page_strategy` for memory that can step
back, `snapshot_strategy` for memory that cannot. It looks the prompt up in the engine, and compares reading with
computing (``engine.compute_rate``). What is worth reading goes into llama.cpp's memory, page by page (`paged_memory`)
or joined to a whole state (`restore`); nothing is evaluated before all of it is verified.

An evaluation becomes pages. The `attachment` has put the hook's ``eval`` in the place of the ``Llama``'s. It evaluates
batch by batch, stops where a snapshot pays (``models.boundaries``), and notes the tokens in the lineage. When a page is
full, the strategy copies its rows out of the memory, or cuts them from a copy of the state (`capture`), and gives them
to the engine's write queue. If anything else reaches the context, the `watch` makes it unknown: nothing more is
captured, and the next prompt begins with an empty one.

`state` has the bytes of llama.cpp's states, without llama.cpp. `fingerprint` says which contexts may share them,
`llama_state` knows what a ``LlamaState`` holds, and `binding` has all of llama-cpp-python that may move.

`kv_memory` has what all memory has in common: emptying it, and undoing an interrupted change.

Apart from a few modules of ``server`` and ``warming``, only these import llama_cpp when they are loaded.
"""
