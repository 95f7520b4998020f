"""A server marks the roles of its chats by the template, and what requests mark beside them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")

import kvdsl
from kvdsl.generation.models import encode, load_model
from kvdsl.generation.spans import mark_all
from kvdsl.runtime.hf.versions import with_cache
from tests.vllm.alone import NEAR
from tests.vllm.test_metrics import server

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who came to the old house on the hill by night?"}]},
    {"role": "assistant", "content": "The captain came, with a lantern and his dog."},
    {"role": "tool", "content": "It rained all night, and the road was bad."},
    {"role": "user", "content": "And who went?"},
]
POLICY = """kv 2
policy Both {
  "The system prompt and what is pinned stay."
  param budget = 30
  input system from spans
  input pinned from spans
  score mean(attn) * (1 + turn)
  keep where system or pinned
  keep last 4
}
"""
NEW = 12


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("roles")
    (folder / "both.kv").write_text(POLICY)
    (folder / "chat.jinja").write_text(TEMPLATE)
    more = ("--middleware", "kvdsl.integrations.vllm.roles.Roles", "--chat-template", str(folder / "chat.jinja"))
    with server({"policy": str(folder / "both.kv")}, 1, more, folder / "log") as found:
        yield found


def ask(address: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": NEW,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
        **more,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def thought_of(found: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in found["choices"][0]["logprobs"]["content"]]


def alone(spans: dict[str, Any]) -> list[float]:
    """In transformers with these marks: the log-probabilities of what comes greedily."""
    model, tokenizer = load_model(None)
    told = [
        one | {"content": one["content"] if isinstance(one["content"], str) else one["content"][0]["text"]}
        for one in MESSAGES
    ]
    tokenizer.chat_template = TEMPLATE
    marked = kvdsl.spans_of(tokenizer, told, spans)
    ids = encode(tokenizer, tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True))
    cache = kvdsl.compile(POLICY)(model)
    mark_all(cache, marked | {"pinned": spans.get("pinned", [])})
    out, new = [], torch.tensor([ids])
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(new, **with_cache(cache)).logits[0, -1].log_softmax(-1)
            new = logits.argmax().view(1, 1)
            out.append(float(logits[new]))
    return out


def test_roles_are_marked_by_the_template_and_more_by_the_request(address: str) -> None:
    roles = thought_of(ask(address))
    assert np.abs(np.array(roles) - alone({"system": [], "turns": []})).max() < NEAR
    pinned = {"pinned": [[20, 26]]}
    more = thought_of(ask(address, vllm_xargs={"kvdsl_spans": json.dumps(pinned)}))
    assert np.abs(np.array(more) - alone({"system": [], "turns": [], **pinned})).max() < NEAR
    assert np.abs(np.array(more) - roles).max() > 100 * NEAR
    assert np.abs(np.array(roles) - alone({})).max() > 100 * NEAR, "marks change nothing"


@pytest.mark.parametrize(
    ("spans", "says"),
    [({"tool": [[0, 2]]}, "has no span `tool`"), ({"pinned": [[0, 999]]}, "names place 999"), (3, "stretches by name")],
)
def test_a_wrong_mark_is_an_error_of_its_request(address: str, spans: Any, says: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, vllm_xargs={"kvdsl_spans": json.dumps(spans)})
    assert refused.value.code == 400
    assert says in json.load(refused.value)["error"]["message"]
    with pytest.raises(urllib.error.HTTPError):
        ask(address, messages="none")
    assert thought_of(ask(address))
