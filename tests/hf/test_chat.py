"""A chat: roles, thinking and turns are told to the cache, and only what is new is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvdsl
from kvdsl.assets import load_reference_model
from kvdsl.errors import KvdslError
from kvdsl.generation.models import encode
from tests.hf.test_given import held
from tests.hf.test_spans import DROPS, cache_class

pytestmark = pytest.mark.nightly

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
REFUSING = "{% if messages[-1].role == 'system' %}{{ raise_exception('a system prompt alone') }}{% endif %}" + TEMPLATE
ROLES = "input system from spans\ninput tool from spans\ninput assistant from spans\n"
ROLES += DROPS.replace("score not done", "score where(done, 0, 1 + system + tool + assistant)")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return load_reference_model()


def saying(tokenizer: Any, talk: Any, text: str) -> dict[str, Any]:
    """Settings of `generate` that have the model say this."""
    words, begun = encode(tokenizer, text), []

    def allowed(_: int, ids: Any) -> list[int]:
        begun.append(len(ids))
        return [words[len(ids) - begun[0]]]

    return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": len(words), "do_sample": False}


def spoken(tokenizer: Any, talk: Any, cache: Any, span: str) -> str:
    """The text that is marked so, of what is held."""
    position, inside = cache.positions(0)[0, 0], cache.state(0)[f"given_{span}"][0, 0]
    places = sorted(int(p) for p, one in zip(position, inside, strict=True) if p >= 0 and one)
    return str(tokenizer.decode([talk.ids[place] for place in places]))


@pytest.mark.parametrize("template", [TEMPLATE, REFUSING], ids=["plain", "refusing"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_roles_become_spans_and_thinking_leaves(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, backend: str, template: str
) -> None:
    model, tokenizer = parts
    monkeypatch.setattr(tokenizer, "chat_template", template)
    cache = cache_class(ROLES)(model, backend=backend)
    talk = kvdsl.chat(model, tokenizer, cache)
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came?"}]
    said = "<think> a dark night </think> The captain"
    assert talk(first, **saying(tokenizer, talk, said)).strip() == said
    whole = tokenizer.decode(talk.ids)
    assert whole.strip() == f"[system] Be brief. [end]\n[user] Who came? [end]\n[assistant] {said}"
    kept = tokenizer.decode([talk.ids[place] for place in held(cache, 0, 0, 0)])
    assert "dark" not in kept and "Be brief" in kept and "Who came" in kept
    assert "Be brief." in spoken(tokenizer, talk, cache, "system")
    assert "Who" not in spoken(tokenizer, talk, cache, "system")

    seen = cache.get_seq_length()
    assert seen == len(talk.ids) - 1, "the last token has not been read"
    talk([{"role": "tool", "content": "21 degrees"}], **saying(tokenizer, talk, "Warm"))
    assert cache.get_seq_length() == len(talk.ids) - 1
    assert "21 degrees" in spoken(tokenizer, talk, cache, "tool")
    assert "Warm" not in spoken(tokenizer, talk, cache, "tool")
    assert spoken(tokenizer, talk, cache, "assistant").startswith(" The captain")
    assert [one["role"] for one in talk.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert tokenizer.decode(talk.ids).count("Be brief") == 1
    assert float(cache.state(0)["given_turn"].max()) == 1


def test_a_marker_in_the_prompt_opens_a_thought(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As templates do whose models always think; and a thought that does not end is one."""
    model, tokenizer = parts
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("[assistant] ", "[assistant] <think>"))
    cache = cache_class(DROPS)(model, backend="torch")
    talk = kvdsl.chat(model, tokenizer, cache)
    talk("Who came?", **saying(tokenizer, talk, "It was a dark night"))
    kept = tokenizer.decode([talk.ids[place] for place in held(cache, 0, 0, 0)])
    assert "Who came?" in kept
    assert "dark" not in kept


def test_what_is_no_chat(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = parts
    fresh: Callable[[], Any] = lambda: kvdsl.load("h2o")(model, budget=64, recent=8)  # noqa: E731
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(KvdslError, match="has no chat template"):
        kvdsl.chat(model, tokenizer, fresh())
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    cache = fresh()
    talk = kvdsl.chat(model, tokenizer, cache)  # a policy that reads nothing of it
    with pytest.raises(KvdslError, match="a chat has one row"):
        talk("Hello", num_beams=2)
    assert talk("Hello", max_new_tokens=3)
    with pytest.raises(KvdslError, match="the cache is not empty"):
        kvdsl.chat(model, tokenizer, cache)


def test_spans_of_a_conversation_are_those_that_a_chat_marks(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = parts
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    cache = cache_class(ROLES)(model, backend="torch")
    talk = kvdsl.chat(model, tokenizer, cache)
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who came?"}]
    talk(first, **saying(tokenizer, talk, "<think> a dark night </think> The captain"))
    told = [*talk.messages, {"role": "tool", "content": "21 degrees"}]
    spans = kvdsl.spans_of(tokenizer, told)
    ids = encode(tokenizer, tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True))
    assert spans.pop("prompt")[0] == len(ids)
    assert spans.pop("user") and spans.pop("turns") == [len(talk.ids)]
    assert spans["assistant"].pop() == [len(ids), None]
    talk(told[-1:], max_new_tokens=1, do_sample=False)
    assert talk.ids[: len(ids)] == ids
    for name, stretches in spans.items():
        marked = [[start, end] for _, start, end in cache._supplying.marks._stretches[name]]
        assert stretches == marked[: len(stretches)] and len(stretches) == 1, name
    assert set(kvdsl.spans_of(tokenizer, told, ["tool"])) == {"tool", "prompt"}


def test_spans_of_what_goes_on(parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = parts
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("[assistant] ", "[assistant] <think>"))
    told = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>no</think>yes"}]
    spans = kvdsl.spans_of(tokenizer, [*told, told[0]])
    length = spans["prompt"][0]
    assert spans["think"][-1][1] is None and spans["think"][-1][0] < length and len(spans["think"]) == 2
    going = kvdsl.spans_of(tokenizer, told, add_generation_prompt=False)
    assert going["assistant"][-1][1] is None and "turns" in going and not going["turns"]
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(KvdslError, match="has no chat template"):
        kvdsl.spans_of(tokenizer, told)
