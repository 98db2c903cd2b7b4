"""`Session`: the conversations of one sample, by the messages that a client sends, as trajectories of exact tokens."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerl.data.pictures import Picture
from scalerl.rewards.manager import number_of
from scalerl.rollout.gateway.template import ChatTemplate, Message, TemplateError, images_of, is_same
from scalerl.rollout.program import Observation, Servers, Trajectory
from scalerl.rollout.servers.requests import GenerateOutput


class RequestError(Exception):
    """A request that is refused.  status: of HTTP.  code: as clients of OpenAI's API know it."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class Parsers:
    """Names of SGLang's parsers of an answer; None: the answer is its text.

    tool_calls: for tool calls.  reasoning: for thoughts.
    """

    tool_calls: str | None = None
    reasoning: str | None = None


@dataclass(eq=False)
class Turn:
    """An answer of the policy, and all that came before it.

    messages: the conversation with the answer.  tools: that were shown.  prompt_ids: of the conversation's beginning.
    observed: tokens between the turn before and this one.  is_branch: the turn before had been continued already.
    pictures: those in observed, or in prompt_ids of a first turn.
    matched_stop: the text that ended the answer, which the answer is without.  agent: name of whose turn it is.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    parent: Turn | None
    prompt_ids: list[int]
    observed: list[int]
    output: GenerateOutput
    is_branch: bool = False
    matched_stop: str = ""
    agent: str = ""
    pictures: list[Picture] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def num_tokens_before(self) -> int:
        """The number of tokens of the conversation before the answer."""
        parts = sum(len(turn.observed) + len(turn.output.output_ids) for turn in self.path)
        return len(self.prompt_ids) + parts - len(self.output.output_ids)

    def is_answer(self, sent: Message) -> bool:
        """Whether a client has sent the answer back; perhaps with the text that ended it, as frameworks do."""
        answer = self.messages[-1]
        return is_same(answer, sent) or is_same(answer | {"content": answer["content"] + self.matched_stop}, sent)

    @property
    def path(self) -> list[Turn]:
        """The turns from the first of the conversation to this one."""
        return [*(self.parent.path if self.parent is not None else ()), self]


@dataclass(eq=False)
class Session:
    """What the client with one key has asked for.

    A request continues the longest known conversation of its agent that its messages begin with; whatever differs from
    the answers that the policy gave begins a branch there. A turn is known from the moment at which its client has the
    answer.
    """

    servers: Servers
    template: ChatTemplate
    parsers: Parsers
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: list[Turn] = field(default_factory=list)
    # The score of the sample, and other values. An agent that is not in `of_agents` has them.
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    # Name of an agent -> the score of that agent, and other values.
    of_agents: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    # By URL.
    pictures: dict[str, Picture] = field(default_factory=dict)

    async def answer(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        agent: str = "",
    ) -> Turn:
        """Samples the next turn of a conversation. It is the session's once it is in `turns`.

        Raises RequestError for messages that cannot be rendered, or have no room.
        """
        try:
            await self._look_at(messages)
            parent = self._known(messages, tools, agent)
            if parent is not None and any(map(self.servers.says_placeholder, (turn.output for turn in parent.path))):
                raise self._too_long(parent.num_tokens_before + len(parent.output.output_ids))
            is_branch = parent is not None and self._has_child(parent)
            new = messages if parent is None else messages[len(parent.messages) :]
            pictures = [self.pictures[url] for url in images_of(new)]
            trajectory, observed = self._begun(parent, messages, tools, is_branch, pictures)
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from error
        if trajectory.is_cut or trajectory.room < 1:
            raise self._too_long(len(trajectory.prompt_ids) + trajectory.num_tokens)
        output = await self.servers.generate(trajectory, max_new_tokens=max_tokens, stop=stop)
        message, matched = await self._message(output, tools, stop or ())
        conversation, prompt_ids = [*messages, message], trajectory.prompt_ids
        return Turn(conversation, tools, parent, prompt_ids, observed, output, is_branch, matched, agent, pictures)

    async def _look_at(self, messages: list[Message]) -> None:
        """Decodes the images that the session does not know yet, each in a thread."""
        new = [url for url in dict.fromkeys(images_of(messages)) if url not in self.pictures]
        made = await asyncio.gather(*(asyncio.to_thread(self.template.picture, url) for url in new))
        self.pictures |= dict(zip(new, made, strict=True))

    def _known(self, messages: list[Message], tools: list[dict[str, Any]] | None, agent: str) -> Turn | None:
        """The last turn of the agent's longest conversation that the messages continue."""
        best: Turn | None = None
        for turn in self.turns:
            size = len(turn.messages)
            if size >= len(messages) or (turn.agent, turn.tools) != (agent, tools):
                continue
            if best is not None and size <= len(best.messages):
                continue
            if all(map(is_same, turn.messages[:-1], messages)) and turn.is_answer(messages[size - 1]):
                best = turn
        return best

    def _begun(
        self,
        parent: Turn | None,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        is_branch: bool,
        pictures: list[Picture],
    ) -> tuple[Trajectory, list[int]]:
        """The trajectory up to the next turn, and the tokens that are new in it.  pictures: of the new messages."""
        if parent is None:
            prompt_ids = self.template.prompt(messages, tools, pictures)
            try:
                return self.servers.begin(prompt_ids, pictures=pictures), []
            except ValueError as error:
                raise self._too_long(len(prompt_ids)) from error
        answer, new = parent.messages[-1], messages[len(parent.messages) :]
        observed = self.template.continuation(parent.output, answer.get("tool_calls") or [], new, tools, pictures)
        trajectory = self.servers.begin(parent.prompt_ids, pictures=_pictures(parent.path))
        # The first turn of a branch asks for all that is known of the tokens before it, and those after it go on there.
        path = parent.path
        own = len(path) if is_branch else max((at for at, turn in enumerate(path) if turn.is_branch), default=0)
        trajectory.parts = _parts(path, set(map(id, path[:own])))
        trajectory.observe(observed, pictures)
        return trajectory, observed

    def _has_child(self, turn: Turn) -> bool:
        return any(other.parent is turn for other in self.turns)

    def _too_long(self, num_tokens: int) -> RequestError:
        limit = self.servers.sampling.max_new_tokens
        return RequestError(
            f"the conversation has {num_tokens} tokens: a first request may have data.max_prompt_length="
            f"{self.servers.max_prompt_length}, and what follows data.max_response_length={limit}",
            code="context_length_exceeded",
            param="messages",
        )

    async def _message(
        self, output: GenerateOutput, tools: list[dict[str, Any]] | None, stop: Sequence[str]
    ) -> tuple[Message, str]:
        """The policy's turn as a message, without the text that stopped it, and that text."""
        parsers, ask = self.parsers, self.servers.ask_server
        text = self.template.text(output, with_special_tokens=parsers != Parsers())
        # The last token may have more than the end.
        matched = min((end for end in stop if end and end in text), key=text.index, default="")
        text = text.partition(matched)[0] if matched else text
        message: Message = {"role": "assistant"}
        if (reasoning := parsers.reasoning) is not None and ask is not None:
            thoughts, text = await ask(lambda client: client.separate_reasoning(text, reasoning))
            message |= {"reasoning_content": thoughts} if thoughts else {}
        calls: list[Message] = []
        if (tool_calls := parsers.tool_calls) is not None and tools and ask is not None:
            text, found = await ask(lambda client: client.parse_tool_calls(text, tool_calls, tools))
            calls = [
                {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function} for function in found
            ]
        message["content"] = text
        return message | ({"tool_calls": calls} if calls else {}), matched

    def reward_turns(self, rewards: Any) -> None:
        """Gives turns rewards (`GenerateOutput.reward`).  rewards: id of an answer, as its client has it -> number.

        Raises ValueError for anything else, and then changes nothing.
        """
        if not isinstance(rewards, Mapping):
            raise ValueError(f"turn_rewards is {rewards!r:.80}; it must be an object: id of an answer -> its reward")
        # An answer's id is that of its turn, behind a prefix of the dialect.
        known = {turn.id: turn.output for turn in self.turns}
        outputs = {name: known.get(re.split("[-_]", str(name))[-1]) for name in rewards}
        for name, reward in rewards.items():
            if outputs[name] is None or number_of(reward) is None:
                raise ValueError(
                    f"turn_rewards has {name!r}: {reward!r:.80}; it must have ids of this sample's answers "
                    f"({len(known)} so far) with finite numbers"
                )
        for name, output in outputs.items():
            if output is not None:
                output.reward = float(rewards[name])

    def trajectories(self) -> list[Trajectory]:
        """One for each conversation that no other continues, in the order in which the clients got their last answers.

        A turn that several have in common is trained with the first of them. The last one of each agent has its score.
        """
        trained: set[int] = set()
        made = []
        for leaf in self.turns:
            if self._has_child(leaf):
                continue
            trajectory = self.servers.begin(leaf.prompt_ids, agent=leaf.agent, pictures=_pictures(leaf.path))
            trajectory.parts = _parts(leaf.path, trained)
            trained.update(map(id, leaf.path))
            made.append(trajectory)
        for agent, last in {trajectory.agent: trajectory for trajectory in made}.items():
            reward, extra = self.of_agents.get(agent, (self.reward, {}))
            last.reward, last.extra = reward, self.extra | extra
        return made


def _pictures(path: Sequence[Turn]) -> list[Picture]:
    """The pictures of a conversation."""
    return [picture for turn in path for picture in turn.pictures]


def _parts(path: Sequence[Turn], trained: set[int]) -> list[GenerateOutput | Observation]:
    """The parts of a conversation.  trained: ids of turns that another trajectory has."""
    parts: list[GenerateOutput | Observation] = []
    for turn in path:
        if turn.observed:
            parts.append(Observation(turn.observed))
        parts.append(Observation(turn.output.output_ids) if id(turn) in trained else turn.output)
    return parts
