"""LMCache's side of `benchmarks.connectors`: puts values into a server by one of its connectors, and gets them back.

Run by the interpreter of an environment that has LMCache, as ``python -I benchmarks/lmcache_peer.py JOB``: -I keeps the
modules beside this file from hiding others of the same name. It imports nothing of this project. Each line of its
standard input is a command, each line of its output an answer in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

# as long as nobody answers; LMCache itself gives up after 10 s, and reports no failure of a put
LONGEST = 120.0


class Values:
    """Chunks of a prompt and the connector that moves them.

    Parameters
    ----------
    job
        ``url`` of the server as LMCache takes it; ``values``, a file with one chunk after another; ``layers``,
        ``heads``, ``head_dim`` and ``chunk_tokens`` of the model; and ``options`` of the connector.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        # nothing is reported to LMCache's servers, and nothing downloaded
        os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        import numpy as np
        import torch
        from lmcache import __version__
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        self.version = __version__
        self._bytes_of = lambda chunk: np.frombuffer(memoryview(chunk.byte_array).cast("B"), np.uint8)
        self._same = np.array_equal
        shape = (job["layers"], 2, job["chunk_tokens"], job["heads"], job["head_dim"])
        metadata = LMCacheMetadata(
            model_name=job["url"].partition(":")[0],
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=shape,
            chunk_size=job["chunk_tokens"],
        )
        raw = np.fromfile(job["values"], np.uint8)
        self._values = raw.reshape(-1, 2 * int(np.prod(shape)))
        n = len(self._values)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=job["chunk_tokens"],
            # no copy in its own memory, so that every get goes to the server
            local_cpu=False,
            # what is put and what is got, and some more
            max_local_cpu_size=2 * raw.nbytes / 2**30 + 0.5,
            remote_url=job["url"],
            extra_config={"save_chunk_meta": False, **job["options"]},
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._backend = RemoteBackend(config, metadata, self._loop, memory, dst_device="cpu")
        if self._backend.connection is None:
            # it only logs why
            raise ConnectionError(f"LMCache has no connection to {job['url']}")
        self._keys = [CacheEngineKey(metadata.model_name, 1, 0, 1 + i, torch.float16) for i in range(n)]
        self._allocate = lambda: memory.allocate(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD)

    def put(self) -> dict[str, Any]:
        """Put all chunks, as `LMCacheEngine.store` does; until the server has acknowledged the last one."""
        chunks = [self._allocate() for _ in self._keys]
        for chunk, value in zip(chunks, self._values, strict=True):
            self._bytes_of(chunk)[:] = value
        acknowledged = threading.Semaphore(0)
        started = time.perf_counter()
        self._backend.batched_submit_put_task(self._keys, chunks, on_complete_callback=lambda _: acknowledged.release())
        for _ in self._keys:
            if not acknowledged.acquire(timeout=LONGEST):
                raise TimeoutError(f"LMCache has not put all chunks within {LONGEST:.0f} s")
        seconds = time.perf_counter() - started
        for chunk in chunks:
            chunk.ref_count_down()
        return {"seconds": seconds}

    def get(self) -> dict[str, Any]:
        """Look all chunks up and get them, as `LMCacheEngine.retrieve` does: how many there are without a gap.

        The lookup is the asynchronous one: the other one of its RESP client waits forever if the answer comes before
        it has noted what it waits for (`batch_exists_sync` of LMCache 0.5.6, often the first time).
        """
        started = time.perf_counter()
        found = asyncio.run_coroutine_threadsafe(
            self._backend.batched_async_contains("lookup", self._keys), self._loop
        ).result(LONGEST)
        looked_up = time.perf_counter()
        chunks = self._backend.batched_get_blocking(self._keys[:found]) if found else []
        seconds = time.perf_counter() - started
        n = next((i for i, chunk in enumerate(chunks) if chunk is None), len(chunks))
        good = all(
            self._same(self._bytes_of(chunk), value) for chunk, value in zip(chunks[:n], self._values, strict=False)
        )
        for chunk in chunks:
            if chunk is not None:
                chunk.ref_count_down()
        return {"lookup": looked_up - started, "seconds": seconds, "chunks": n, "good": bool(good)}


def main(job: dict[str, Any]) -> None:
    # what LMCache prints goes to the log
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)

        def answer(**found: Any) -> None:
            answers.write(json.dumps(found) + "\n")

        try:
            values = Values(job)
            answer(version=values.version)
            commands = {"put": values.put, "get": values.get}
            for line in sys.stdin:
                answer(**commands[line.strip()]())
        except Exception as error:  # noqa: BLE001 - told to the parent, which says what was not run
            answer(error=f"{type(error).__name__}: {error}")
        answers.flush()
        # closing a connector waits in the event loop for what the event loop has to do (LMCache 0.5.6)
        os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
