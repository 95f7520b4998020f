"""Mark the roles of chats in vLLM's server: ASGI middleware, `--middleware kvdsl.integrations.vllm.roles.Roles`.

It finds roles, turns and thinking by the server's chat template and adds them to what a request marks itself. The engine compares the
prompt's checksum with that of the prompt that vLLM makes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.generation.spans import names_of, spans_of
from kvdsl.integrations.vllm.request_marks import KEY
from kvdsl.integrations.vllm.settings import Settings, asked

_PATH = "/v1/chat/completions"


class Roles:
    """See the module."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request as ASGI says."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATH):
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        state = scope["app"].state
        settings = asked(state.engine_client.vllm_config)
        if settings is not None and names_of(settings.spec):
            try:
                body = await _marked(body, settings, state)
            except Exception as error:  # templates refuse messages in many ways
                await _refuse(send, str(error))
                return
        length = str(len(body)).encode()
        headers = [(name, length if name == b"content-length" else value) for name, value in scope["headers"]]
        await self._app(scope | {"headers": headers}, _replay(body, receive), send)


async def _marked(body: bytes, settings: Settings, state: Any) -> bytes:
    """Add the spans that the policy reads to a request's body. Return a body that vLLM will refuse unchanged."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        found = json.loads(body)
        request = ChatCompletionRequest.model_validate(found)
    except ValueError:
        return body
    renderer = state.online_renderer
    template = renderer.effective_chat_template_kwargs(request)
    template["tools"] = [tool.model_dump() for tool in request.tools] if request.tools else None
    template["chat_template"] = request.chat_template or renderer.chat_template
    made = await renderer.render_chat(request)
    if not isinstance(made, tuple):
        return body
    tokenizer = state.engine_client.get_tokenizer()
    spans = await asyncio.to_thread(
        spans_of, tokenizer, made[0], names_of(settings.spec), thinks=settings.thinks, **template
    )
    arguments = found.get("vllm_xargs") or {}
    found["vllm_xargs"] = {**arguments, KEY: json.dumps(_joined(spans, arguments.get(KEY, {})))}
    return json.dumps(found).encode()


def _joined(spans: Mapping[str, list[Any]], own: Any) -> dict[str, Any]:
    """Add a client's own marks to the template's.

    Raises:
        KvdslError: if they are no marks.
    """
    try:
        own = json.loads(own) if isinstance(own, str) else own
        return {**spans, **{name: [*spans.get(name, []), *found] for name, found in own.items() if name != "prompt"}}
    except (ValueError, TypeError, AttributeError) as error:
        raise KvdslError(f'`{KEY}` is {own!r}; give stretches by name, {{"tool": [[12, 40]]}}, as JSON') from error


async def _body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` that brings the body, and then what the client sends."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return left.pop() if left else await receive()

    return replay


async def _refuse(send: Any, why: str) -> None:
    """Answer with an error, in the API's form."""
    error = {"error": {"message": why, "type": "BadRequestError", "param": KEY, "code": 400}}
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})
