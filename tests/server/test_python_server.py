"""The real llama_cpp.server with a store, through the official client."""

from __future__ import annotations

import pytest

from tests.support.python_server import MODEL_OPTIONS, STOCK, serving

SYSTEM = "You are an assistant who knows manual pages. " * 20


def messages(user, system=SYSTEM):
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def text_of(answer):
    return answer.choices[0].message.content


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.slow
def test_a_restarted_server_is_warm_and_answers_as_cold(models, tmp_path):
    ask = [messages("What is ls?"), messages("What is cat?"), messages("What is ls?")]
    streamed, asked = messages("Stream this."), {"logprobs": True, "top_logprobs": 2}
    model = ("--model", str(models("llama")))

    def cold(given, **options):
        """What the server answers from an empty context."""
        server.complete("x", max_tokens=1)
        return server.chat(given, **options)

    with serving(*model, *MODEL_OPTIONS, module=STOCK) as server:
        right, right_streamed, right_logprobs = [cold(one) for one in ask], cold(streamed), cold(ask[0], **asked)
    command = (str(tmp_path / "store"), *model, "--", *MODEL_OPTIONS)
    with serving(*command) as server:
        first = [server.chat(one) for one in ask]
        for _ in range(2):
            chunks = list(server.chat(streamed, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(right_streamed)
            assert chunks[-1].choices[0].finish_reason == "length"
        assert server.stop() == 0
    with serving(*command) as server:
        second = [server.chat(one) for one in ask]
        answer = server.chat(streamed)
        assert cached(answer) == answer.usage.prompt_tokens - 1
        assert server.chat(ask[0], **asked).choices == right_logprobs.choices
    for expected, before, after in zip(right, first, second, strict=True):
        assert text_of(before) == text_of(after) == text_of(expected)
        assert before.usage.total_tokens == after.usage.total_tokens == expected.usage.total_tokens
    n = first[0].usage.prompt_tokens
    assert cached(first[0]) == 0
    # the second has the system prompt in common with the first, which is live; the third is stored
    assert n - 16 < cached(first[1]) < n
    assert cached(first[2]) == n - 1
    assert [cached(one) for one in second] == [n - 1, first[1].usage.prompt_tokens - 1, n - 1]
