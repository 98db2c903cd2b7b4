"""`Gateway`: the HTTP server of the chat endpoint, in the event loop of the process whose samples it makes.

It answers OpenAI's chat completions and Anthropic's messages, plain and streamed. Each session has a separate key.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from scalerl.rewards.manager import number_of
from scalerl.rollout.gateway import anthropic
from scalerl.rollout.gateway.session import RequestError, Session, Turn
from scalerl.rollout.gateway.template import Message

MODEL = "policy"
# Fields of a request that change nothing in what is sampled.
_WITHOUT_EFFECT = {"user", "metadata", "store", "seed", "service_tier", "parallel_tool_calls", "safety_identifier"}
_KNOWN = {"model", "messages", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop"}
_LARGEST_REQUEST = 64 * 2**20


class Gateway:
    """Serves sessions. It listens on this machine alone, and only while there is a session."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        # Key of a session -> what to do with an error that is not the client's.
        self._on_error: dict[str, Callable[[BaseException], None]] = {}
        # Requests of each session that are not answered yet.
        self._requests: dict[str, set[asyncio.Task[Any]]] = {}
        # Gives the server and its base URL, once it listens.
        self._listening: asyncio.Task[tuple[web.AppRunner, str]] | None = None

    @asynccontextmanager
    async def serving(self, session: Session, on_error: Callable[[BaseException], None]) -> AsyncIterator[str]:
        """Serves a session inside the block, and yields the base URL for its client.

        on_error: gets what fails in a request and is not the client's fault, of servers or of scalerl itself.
        """
        self.sessions[session.key], self._on_error[session.key] = session, on_error
        self._requests[session.key] = set()
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        listening = self._listening
        try:
            _, url = await asyncio.shield(listening)
            yield url
        finally:
            del self.sessions[session.key], self._on_error[session.key]
            for task in self._requests.pop(session.key):
                task.cancel()
            if not self.sessions:
                self._listening = None
                runner, _ = await listening
                await runner.cleanup()

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answers on a socket that listens already too, inside the block, which is within that of a session."""
        assert self._listening is not None, "no session"
        runner, _ = await self._listening
        site = web.SockSite(runner, listener)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    async def _listen(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._answered(self._chat))
        app.router.add_post("/v1/messages", self._answered(self._messages, anthropic.error_of))
        app.router.add_get("/v1/models", self._answered(self._models))
        app.router.add_post("/v1/reward", self._answered(self._reward))
        # A client that goes away takes its request with it.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}/v1"

    def _answered(
        self, handle: Callable[..., Any], error_of: Callable[[RequestError], dict[str, Any]] | None = None
    ) -> Callable[[web.Request], Any]:
        """A route for sessions.  error_of: a refusal as its dialect has it; None: OpenAI's."""
        error_of = error_of or _error

        async def answered(request: web.Request) -> web.StreamResponse:
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            session = self.sessions.get(request.headers.get("x-api-key", bearer))
            try:
                if session is None:
                    raise RequestError("no sample has this key, or it has ended", status=401, code="invalid_api_key")
                task = asyncio.current_task()
                assert task is not None, "not in an event loop"
                self._requests[session.key].add(task)
                task.add_done_callback(self._requests[session.key].discard)
                return await handle(request, session)
            except RequestError as error:
                return web.json_response(error_of(error), status=error.status)
            except (asyncio.CancelledError, ConnectionError, web.HTTPException):
                raise
            except Exception as error:
                if session is not None and session.key in self._on_error:
                    self._on_error[session.key](error)
                ended = RequestError("the sample has ended", status=503)
                return web.json_response(error_of(ended), status=503)

        return answered

    async def _models(self, request: web.Request, session: Session) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "scalerl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await _json(request)
        of_turns = body.get("turn_rewards", {})
        reward = number_of(body.get("reward"))
        if reward is None and (not of_turns or "reward" in body):
            raise RequestError(f"reward is {body.get('reward')!r}; it must be a finite number", param="reward")
        agent, extra = body.get("agent"), body.get("extra") or {}
        if not isinstance(extra, dict):
            raise RequestError(f"extra is {extra!r:.80}; it must be an object of values", param="extra")
        agents = list(dict.fromkeys(turn.agent for turn in session.turns))
        if agent is not None and agent not in agents:
            raise RequestError(
                f"agent is {agent!r}, which has no answer yet: the model of its requests must be {MODEL}:{agent}; "
                f"those with answers are {agents}",
                param="agent",
            )
        try:
            session.reward_turns(of_turns)
        except ValueError as error:
            raise RequestError(str(error), param="turn_rewards") from error
        if reward is not None and agent is not None:
            session.of_agents[agent] = float(reward), extra
        elif reward is not None:
            session.reward, session.extra = float(reward), extra
        return web.json_response({})

    async def _chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await _json(request)
        turn = await _asked(body, session)
        answer = _completion(turn, _model(body))
        return await _given(request, session, turn, _chunks(answer, body) if body.get("stream") else answer)

    async def _messages(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await _json(request)
        turn = await _asked(anthropic.as_chat(body), session)
        answer = anthropic.message_of(turn, _model(body))
        return await _given(request, session, turn, anthropic.events(answer) if body.get("stream") else answer)


def _model(body: Mapping[str, Any]) -> str:
    return str(body.get("model") or MODEL)


def _agent(body: Mapping[str, Any]) -> str:
    """The name of the agent that asks: that of the model policy:NAME, and none of other models."""
    name, _, agent = _model(body).partition(":")
    return agent if name == MODEL else ""


async def _asked(body: Mapping[str, Any], session: Session) -> Turn:
    """The turn that a request for a chat completion asks for."""
    messages, tools = _checked(body, session)
    stop = body.get("stop")
    return await session.answer(
        messages,
        tools,
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        stop=[stop] if isinstance(stop, str) else stop,
        agent=_agent(body),
    )


async def _given(
    request: web.Request, session: Session, turn: Turn, answer: dict[str, Any] | str
) -> web.StreamResponse:
    """Sends the client a turn, which then is the session's.  answer: JSON, or the events of a stream."""
    if isinstance(answer, str):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        # With its end, as a client may go once it has the last event.
        await response.write_eof(answer.encode())
    else:
        response = web.json_response(answer)
        await response.prepare(request)
        await response.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has gone")
    # Whoever went away before has raised, and what it asked for is nobody's.
    session.turns.append(turn)
    return response


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.text())
    except ValueError as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request must be a JSON object")
    return body


def _checked(body: Mapping[str, Any], session: Session) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools of a request. Raises RequestError for what would be drawn from another distribution than
    the trainer computes, or that is not known here."""
    sampling = session.servers.sampling
    runs = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    runs |= {"n": 1, "logprobs": False}
    runs |= {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    runs["tool_choice"] = "auto"
    for name, value in body.items():
        if name in _WITHOUT_EFFECT | _KNOWN or value is None or (name in runs and value == runs[name]):
            continue
        why = f"it must be {runs[name]!r}, or left out" if name in runs else "it is not known here"
        raise RequestError(
            f"{name} is {value!r:.80}: {why}. The policy is trained on what it samples as the run is configured; "
            "grammars, forced tools and other sampling have other log-probs",
            code="unsupported_parameter",
            param=name,
        )
    messages, stop = body.get("messages"), body.get("stop")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RequestError(
            "messages must be a list of at least one message, each with a role, a content of text, and tool_calls that "
            "have a function with a name",
            param="messages",
        )
    if stop is not None and not (
        isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(end, str) for end in stop))
    ):
        raise RequestError(f"stop is {stop!r:.80}; it must be a string or a list of strings", param="stop")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestError(f"stream_options is {body['stream_options']!r:.80}; it must be an object")
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and not (isinstance(body[name], int) and body[name] >= 1):
            raise RequestError(f"{name} is {body[name]!r}; it must be an integer of at least 1", param=name)
    return messages, body.get("tools") or None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content, calls = message.get("content"), message.get("tool_calls") or []
    has_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not (content is None or isinstance(content, str) or has_parts) or not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions)


def _completion(turn: Turn, model: str) -> dict[str, Any]:
    message = {key: value for key, value in turn.messages[-1].items() if value is not None}
    finish_reason = "tool_calls" if message.get("tool_calls") else turn.output.finish_reason
    num_output, num_prompt = len(turn.output.output_ids), turn.num_tokens_before
    return {
        "id": f"chatcmpl-{turn.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
    }


def _chunks(answer: dict[str, Any], body: Mapping[str, Any]) -> str:
    """The answer as events. It is there as a whole, so that its content is one event."""
    (choice,) = answer["choices"]
    message = dict(choice["message"])
    calls = [call | {"index": index} for index, call in enumerate(message.pop("tool_calls", []))]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": message.pop("role"), "content": ""}, None)]
    deltas += [({name: text}, None) for name, text in message.items() if text]
    deltas += [({"tool_calls": calls}, None)] if calls else []
    deltas += [({}, choice["finish_reason"])]
    same = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events = [
        same | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
        for delta, reason in deltas
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(same | {"choices": [], "usage": answer["usage"]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def _error(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
