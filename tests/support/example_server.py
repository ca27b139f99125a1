"""The example server of llama-cpp-python, as a module: its real scheduler, driven without HTTP."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prefixstore.llama.binding import silence
from tests.support import ROOT

NAME = "llama_cpp_python_example_server"
PLACES = (ROOT.parent / "shared" / "peers", Path("/work/shared/peers"))
OPTIONS = {"n_ctx": 4096, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1, "n_seq_max": 4}


@functools.cache
def example_server() -> ModuleType:
    """``examples/server/server.py`` of llama-cpp-python 0.3.36."""
    given = os.environ.get("EXAMPLE_SERVER")
    files = [Path(given)] if given else [place / f"{NAME}.py" for place in PLACES]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        pytest.fail("set EXAMPLE_SERVER= to examples/server/server.py of llama-cpp-python 0.3.36")
    spec = importlib.util.spec_from_file_location(NAME, found)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    silence()
    return module


class Example:
    """A model, its scheduler, and what they computed."""

    def __init__(self, path: Path | str, cache: Any = None, **options: Any) -> None:
        self.module = example_server()
        self.model = self.module.Model(model_path=str(path), **{**OPTIONS, **options})
        self.computed = 0
        decode = self.model.decode

        def counted() -> None:
            self.computed += self.model.batch.n_tokens
            decode()

        self.model.decode = counted
        made = cache(self.model) if cache is not None else None
        self.cache = made
        self.computed = 0
        self.scheduler = self.module.CompletionScheduler(self.model, sequence_cache=made)

    def request(self, tokens: list[int], visible_from: int = 0, **payload: Any) -> Any:
        """Submit a request; its result has `text`, or `error`, when it is done."""
        asked = self.module.CreateCompletionRequest(prompt=tokens, **{"max_tokens": 8, "temperature": 0.0, **payload})
        result: dict[str, Any] = {}
        request = self.module.CompletionRequest.from_prepared(
            payload=asked,
            prompt_text="",
            prompt_plan=self.module.PromptPlan.from_tokens("", tokens),
            max_seq_len=self.model.max_seq_len,
            max_output_tokens=None,
            prompt_visible_start=visible_from,
            on_done=lambda done: result.update(text=[choice.text for choice in done.choices]),
            on_error=lambda error: result.update(error=error),
        )
        self.scheduler.submit_request(request)
        return result

    def run(self) -> None:
        while not self.scheduler.is_idle():
            self.scheduler.step()

    def ask(self, tokens: list[int], **payload: Any) -> str:
        """The answer to one request."""
        result = self.request(tokens, **payload)
        self.run()
        assert "error" not in result, result["error"]
        return result["text"][0]

    def forget(self) -> None:
        """Nothing resident, as after a restart."""
        self.scheduler.clear_resident_state()

    def close(self) -> None:
        self.scheduler.close()
