"""Programs: async functions that make one sample each, and what they work with. `single_turn` is the default.

    async def program(prompt, servers, tools) -> Trajectory | list[Trajectory]

asks the servers as often as it likes and adds tokens between the answers (of a tool, of an environment).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from scalerl.base.user_code import (
    UserCodeError,
    cause_of,
    file_of,
    is_users_own,
    place_of,
)
from scalerl.data.pictures import cut, expand
from scalerl.errors import RunError, UserError
from scalerl.rewards.manager import number_of
from scalerl.rollout.servers.requests import ABORTED, NO_VERSION, GenerateOutput, SamplingParams
from scalerl.tracking.timeline import Spans

if TYPE_CHECKING:
    from scalerl.config.schema import ProgramConfig
    from scalerl.data import PromptRow
    from scalerl.data.pictures import Picture, PictureProcessor, PictureSource
    from scalerl.models.routing import RoutingShape
    from scalerl.rollout.servers.client import RolloutClient

KEY = "actor_rollout_ref.rollout.program"
# Begins the error of a sample that its surroundings have failed.
ENVIRONMENT = "environment: "


class EnvironmentFailed(Exception):
    """Raise it in a program or an agent where not the policy has failed but what is around it, such as a container.

    The sample is begun again, and left out in the end (`rollout.program.max_attempts`, `max_failed_frac`).
    """


@dataclass(frozen=True)
class Observation:
    """Tokens of a trajectory that the policy did not sample."""

    output_ids: list[int]


@dataclass
class Trajectory:
    """One sequence of a sample: a prompt, and after it what the policy sampled and what it was shown, in order.

    uid, sample_index: its group and its index there.  max_tokens: most tokens after the prompt, sampled or not.
    reward: the program's own, in place of the reward function's; None: the reward function is asked. The score is this
    reward and the sum of the rewards of the episode's turns (`GenerateOutput.reward`, which a program may set).
    extra: values beside the reward, logged as those of a reward function.
    agent: name of the agent that acts in it (`batch.episodes`); one that is alone needs none.
    pictures: those that stand in its tokens, in order.
    """

    uid: int
    sample_index: int
    prompt_ids: list[int]
    max_tokens: int
    parts: list[GenerateOutput | Observation] = field(default_factory=list)
    reward: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    # Whether tokens were left out for lack of room.
    is_cut: bool = False
    agent: str = ""
    pictures: list[Picture] = field(default_factory=list)

    @property
    def turns(self) -> list[GenerateOutput]:
        """The turns that the policy sampled, in order."""
        return [part for part in self.parts if isinstance(part, GenerateOutput)]

    @property
    def token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return [token for part in self.parts for token in part.output_ids]

    @property
    def num_tokens(self) -> int:
        """The number of tokens after the prompt."""
        return sum(len(part.output_ids) for part in self.parts)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.max_tokens - self.num_tokens

    @property
    def response_mask(self) -> list[bool]:
        """[num_tokens]: whether the policy sampled the token."""
        return [isinstance(part, GenerateOutput) for part in self.parts for _ in part.output_ids]

    @property
    def logprobs(self) -> list[float]:
        """[num_tokens]: log-probs by the sampler, 0 where the policy did not sample."""
        columns = ([0.0] * len(p.output_ids) if isinstance(p, Observation) else p.logprobs for p in self.parts)
        return [logprob for column in columns for logprob in column]

    @property
    def token_versions(self) -> list[int]:
        """[num_tokens]: version of the weights that drew it, NO_VERSION where the policy did not sample."""
        columns = (
            [NO_VERSION] * len(p.output_ids) if isinstance(p, Observation) else p.token_versions() for p in self.parts
        )
        return [version for column in columns for version in column]

    @property
    def num_routed(self) -> int:
        """The number of tokens, from the first of the prompt on, whose experts the turns have."""
        return sum(len(turn.routed_experts) for turn in self.turns if turn.routed_experts is not None)

    @property
    def policy_version(self) -> int:
        """The version of the weights that drew the first token."""
        return next((turn.policy_version for turn in self.turns), NO_VERSION)

    @property
    def finish_reason(self) -> str:
        """stop | length of the last turn; length if tokens were left out; abort if there is no turn."""
        return "length" if self.is_cut else next((turn.finish_reason for turn in reversed(self.turns)), ABORTED)

    @property
    def finished(self) -> bool:
        return bool(self.turns) and all(turn.finished for turn in self.turns)

    def observe(self, token_ids: Sequence[int], pictures: Sequence[Picture] = ()) -> None:
        """Appends tokens that are no part of the loss; those for which there is no room are left out (`is_cut`).

        pictures: those that stand in the tokens (`Tools.encode`).  Raises ValueError for tokens that have others.
        """
        kept, shown = cut(token_ids, pictures, self.room)
        self.pictures += shown
        self.is_cut = self.is_cut or len(kept) < len(token_ids)
        if kept:
            self.parts.append(Observation(kept))

    def branch(self) -> Trajectory:
        """Makes a trajectory that begins with all tokens of this one, and trains none of these again."""
        parts: list[GenerateOutput | Observation] = [Observation(self.token_ids)] if self.parts else []
        return replace(self, parts=parts, reward=None, extra={}, pictures=list(self.pictures))


@dataclass(frozen=True)
class Sample:
    """What one run of a program made, in the order in which it returned them; an agent's follow one another.

    error: why there is no result, and the prompt alone; None: there is one.
    model_s, other_s: seconds in which the program waited for turns, and the others.
    spans: its part of the run's timeline.
    """

    uid: int
    sample_index: int
    trajectories: list[Trajectory]
    error: str | None = None
    model_s: float = field(default=0.0, compare=False)
    other_s: float = field(default=0.0, compare=False)
    spans: Spans = field(default_factory=Spans, compare=False, repr=False)

    @property
    def episodes(self) -> list[list[Trajectory]]:
        """The trajectories of each agent: what has one score."""
        return [
            [t for t in self.trajectories if t.agent == name] for name in {t.agent: None for t in self.trajectories}
        ]


@dataclass
class Ask:
    """One turn that a program asks for. input_ids: the prompt and all after it.  output: the turn as far as it is.

    routed_from: position in prompt and response of the first token whose experts no earlier turn has.
    pictures: those that stand in input_ids.
    """

    input_ids: list[int]
    sampling: SamplingParams
    output: GenerateOutput | None = None
    routed_from: int = 0
    pictures: tuple[Picture, ...] = ()

    def is_for_the_same(self, other: Ask) -> bool:
        """Whether another ask has the same input and sampling parameters."""
        mine, others = ((ask.input_ids, ask.sampling, ask.routed_from, ask.pictures) for ask in (self, other))
        return mine == others


# Makes a turn on a server: (sample, index of the ask in the sample, ask) -> the whole turn, despite lost servers and
# pauses.  ask.output: the interrupted turn to continue, if any.
TurnMaker = Callable[["Servers", int, Ask], Awaitable[GenerateOutput]]
AskServer = Callable[[Callable[["RolloutClient"], Awaitable[Any]]], Awaitable[Any]]


class Servers:
    """The rollout servers, as the program of one sample asks them.

    max_prompt_length: most tokens of a prompt that the program brings; None: any number.
    routing: turns have the experts of their tokens (`GenerateRequest.routing`); None: not.
    asks: its turns, in the order in which they were asked for. A program that begins again gets its earlier turns from
    here, where it asks for the same; those that are not finished are continued.
    ask_server: asks one of them what is no turn (`Dispatcher.ask`).
    pictures: those of the row's prompt.  placeholders: tokens that stand for pictures and videos. A trajectory in which
    the policy has sampled one goes no further: a server would look for its picture.
    """

    def __init__(
        self,
        make_turn: TurnMaker,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        uid: int,
        sample_index: int,
        seed: int,
        max_prompt_length: int | None = None,
        routing: RoutingShape | None = None,
        asks: Sequence[Ask] = (),
        ask_server: AskServer | None = None,
        pictures: Sequence[Picture] = (),
        placeholders: Collection[int] = (),
    ) -> None:
        self.pictures, self.placeholders = list(pictures), frozenset(placeholders)
        self.max_prompt_length, self.ask_server = max_prompt_length, ask_server
        self._make_turn, self.prompt_ids, self.sampling = make_turn, prompt_ids, sampling
        self.uid, self.sample_index, self.seed, self.routing = uid, sample_index, seed, routing
        self.asks: list[Ask] = []
        self._before = list(asks)
        # Seconds in which the program waited for turns; those of turns at the same time count once.
        self.model_s = 0.0
        self._num_waits, self._waits_since = 0, 0.0
        # Its part of the run's timeline. A program may add what it does: `with servers.spans("search"):`.
        self.spans = Spans()

    def begin(
        self, prompt_ids: Sequence[int] | None = None, *, agent: str = "", pictures: Sequence[Picture] = ()
    ) -> Trajectory:
        """Makes a trajectory that has a prompt alone: the row's, or another one, as of a sub-agent.

        pictures: those that stand in another one (`Tools.encode`).
        Raises ValueError for an empty prompt, or one over data.max_prompt_length.
        """
        ids = self.prompt_ids if prompt_ids is None else list(prompt_ids)
        if not ids or (prompt_ids is not None and len(ids) > (self.max_prompt_length or len(ids))):
            raise ValueError(
                f"servers.begin: a prompt of {len(ids)} tokens; it must have 1 to "
                f"data.max_prompt_length={self.max_prompt_length}"
            )
        shown = list(self.pictures if prompt_ids is None else pictures)
        return Trajectory(self.uid, self.sample_index, ids, self.sampling.max_new_tokens, agent=agent, pictures=shown)

    async def generate(
        self,
        trajectory: Trajectory,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> GenerateOutput:
        """Samples the policy's next turn and appends it to the trajectory; it has `output_ids` and `finish_reason`.

        max_new_tokens: limit of this turn, never more than the trajectory has room for.  stop, stop_token_ids: what
        ends this turn, in place of the sample's own; the turn keeps what ended it.
        Whatever happens to servers meanwhile, the whole turn comes back: a program has no error to catch.
        """
        if trajectory.turns and not trajectory.finished:
            raise ValueError("servers.generate: the trajectory's last turn has not ended; await it first")
        room = trajectory.room if max_new_tokens is None else min(max_new_tokens, trajectory.room)
        sampling = self.sampling
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        if stop is not None:
            sampling = replace(sampling, stop=tuple(stop))
        if stop_token_ids is not None:
            sampling = replace(sampling, stop_token_ids=tuple(stop_token_ids))
        # One list object for all samples of a group that begin, which compares as equal at once.
        context = trajectory.prompt_ids + trajectory.token_ids if trajectory.parts else trajectory.prompt_ids
        # A turn without room reaches no server.
        pictures = tuple(trajectory.pictures) if room > 0 else ()
        ask = Ask(context, sampling, routed_from=trajectory.num_routed, pictures=pictures)
        number = len(self.asks)
        self.asks.append(ask)
        before = next((place for place, other in enumerate(self._before) if other.is_for_the_same(ask)), None)
        if before is not None and (output := self._before.pop(before).output) is not None:
            # The program that begins again gives its turns their rewards again.
            ask.output = replace(output, reward=0.0)
        if ask.output is None or not ask.output.finished:
            began_s = time.time()
            with self._waiting():
                ask.output = await self._make_turn(self, number, ask)
            self._record(number, ask.output, began_s)
        trajectory.parts.append(ask.output)
        if self.says_placeholder(ask.output):
            trajectory.max_tokens = trajectory.num_tokens
        return ask.output

    def says_placeholder(self, output: GenerateOutput) -> bool:
        """Whether the policy has sampled a token that stands for a picture."""
        return not self.placeholders.isdisjoint(output.output_ids)

    def _record(self, number: int, turn: GenerateOutput, began_s: float) -> None:
        """Records when a turn waited for a server, and when that read its input and when it sampled."""
        server, sent_s = turn.served or (-1, began_s)
        # A turn that was continued on another server was asked for before.
        if sent_s > began_s:
            self.spans.add("queued", began_s, sent_s)
        about = {"turn": number, "tokens": len(turn.output_ids), "server": server}
        sent_s, ended_s = max(began_s, sent_s), time.time()
        self.spans.add("turn", sent_s, ended_s, **about)
        first_s = turn.first_token_s or 0.0
        # A turn that nothing was added to has that of before.
        if first_s >= sent_s:
            self.spans.add("prefill", sent_s, first_s, turn=number)
            self.spans.add("decode", first_s, ended_s, turn=number)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if not self._num_waits:
            self._waits_since = time.monotonic()
        self._num_waits += 1
        try:
            yield
        finally:
            self._num_waits -= 1
            if not self._num_waits:
                self.model_s += time.monotonic() - self._waits_since

    def begin_again(self) -> None:
        """Makes ready for the program to begin anew, with the turns that it had."""
        self._before, self.asks = self.record(), []

    def record(self) -> list[Ask]:
        """The `asks` for a program that begins again: the turns that it asked for, then earlier ones that it did not
        ask for again."""
        return self.asks + self._before


@dataclass(frozen=True)
class Tools:
    """The tools that a program has beside the servers.

    tokenizer: the policy's.  seed: this sample's, for random choices of the program itself.
    processor: of the policy's pictures; None: it takes none.
    """

    tokenizer: Any
    seed: int
    processor: PictureProcessor | None = None

    def encode(self, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
        """Encodes text without special tokens, except those that the text names.

        pictures: for the placeholders that the text names, in order, each of which becomes as many as it takes.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return expand(ids, pictures[0].token_id, [picture.num_tokens for picture in pictures]) if pictures else ids

    async def picture(self, image: PictureSource) -> Picture:
        """Decodes a picture, the content of a file or its path.  Raises PictureError for one that cannot be read."""
        if self.processor is None:
            raise ValueError("tools.picture: the policy takes no pictures; give a model with a vision tower")
        return await asyncio.to_thread(self.processor.read, image)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes tokens to text without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


Program = Callable[["PromptRow", Servers, Tools], Awaitable["Trajectory | list[Trajectory]"]]


async def single_turn(prompt: PromptRow, servers: Servers, tools: Tools) -> Trajectory:
    """The default program: one answer to the prompt."""
    trajectory = servers.begin()
    await servers.generate(trajectory)
    return trajectory


async def run_program(program: Program, prompt: PromptRow, servers: Servers, tools: Tools) -> Sample:
    """Runs a program and returns its sample. Raises UserCodeError, with sample and line, for what the user's code
    raises, or returns in place of finished trajectories; errors of servers pass through. The user's code gets a copy of
    the prompt, which the samples of a group share."""
    sample = f"prompt {prompt.uid} sample {servers.sample_index}"
    try:
        returned = await program(deepcopy(prompt) if is_users_own(program) else prompt, servers, tools)
    except (UserError, RunError, EnvironmentFailed):
        raise
    except Exception as error:
        if not is_users_own(program):
            raise
        raise UserCodeError(
            f"{KEY}: {place_of(program)} raised {cause_of(error, file_of(program))}, on {sample}"
        ) from error
    trajectories = list(returned) if isinstance(returned, list | tuple) else [returned]
    if wrong := next(_wrongs(returned, trajectories, servers), None):
        raise UserCodeError(f"{KEY}: {place_of(program)} {wrong}, on {sample}")
    names = list(dict.fromkeys(trajectory.agent for trajectory in trajectories))
    trajectories.sort(key=lambda trajectory: names.index(trajectory.agent))
    return Sample(servers.uid, servers.sample_index, trajectories)


async def attempt_program(
    program: Program, prompt: PromptRow, servers: Servers, tools: Tools, config: ProgramConfig
) -> Sample:
    """Runs a program as `run_program`, again where its surroundings failed or it took too long (config.max_attempts).

    Of a sample that has no result in the end there is the prompt alone, and why.
    """
    began, why = time.monotonic(), ""
    for _ in range(config.max_attempts):
        try:
            with servers.spans("program"):
                sample = await asyncio.wait_for(run_program(program, prompt, servers, tools), config.timeout_s)
        except EnvironmentFailed as error:
            why = str(error) or "EnvironmentFailed"
        except TimeoutError:
            why = f"no result within {KEY}.timeout_s={config.timeout_s:g}"
        else:
            other_s = max(0.0, time.monotonic() - began - servers.model_s)
            return replace(sample, model_s=servers.model_s, other_s=other_s, spans=servers.spans)
        servers.begin_again()
    nothing = [servers.begin()]
    return Sample(servers.uid, servers.sample_index, nothing, f"{ENVIRONMENT}{why}", spans=servers.spans)


def _wrongs(returned: Any, trajectories: Sequence[Any], servers: Servers) -> Iterator[str]:
    if not trajectories or not all(isinstance(trajectory, Trajectory) for trajectory in trajectories):
        yield f"returned {returned!r:.200}; return the trajectory that servers.begin() gave, or a list of such"
        return
    for trajectory in trajectories:
        if wrong := _wrong(trajectory, servers):
            yield wrong
    turns = [id(turn) for trajectory in trajectories for turn in trajectory.turns]
    if len(set(turns)) < len(turns):
        yield "returned a turn in two trajectories, which would train it twice; go on from one by trajectory.branch()"
    for episode in Sample(0, 0, list(trajectories)).episodes:
        rewards = {trajectory.reward for trajectory in episode if trajectory.reward is not None}
        if len(rewards) > 1:
            yield (
                f"set rewards {sorted(rewards)} on trajectories of one agent ({episode[0].agent!r}), which have one "
                "score; set one, or begin them with names of their own: servers.begin(agent=...)"
            )


def _wrong(returned: Trajectory, servers: Servers) -> str | None:
    if (returned.uid, returned.sample_index) != (servers.uid, servers.sample_index):
        return "returned the trajectory of another sample; return one that its own servers.begin() gave"
    if not returned.turns:
        return "returned a trajectory without a turn; await servers.generate(trajectory) first"
    asked = {id(ask.output) for ask in servers.asks}
    if not all(turn.finished and id(turn) in asked for turn in returned.turns):
        return "returned a trajectory with a turn that servers.generate did not give; let it put them there"
    limit = servers.sampling.max_new_tokens
    if returned.num_tokens > limit:
        return f"returned {returned.num_tokens} tokens, at most {limit} fit; add tokens by trajectory.observe"
    if servers.placeholders and (wrong := _wrong_pictures(returned, servers)):
        return wrong
    reward = returned.reward
    if reward is not None and number_of(reward) is None:
        return f"set the reward {reward!r:.80}; set a finite number, or None for the reward function's"
    for number, turn in enumerate(returned.turns):
        if number_of(turn.reward) is None:
            return f"set the reward {turn.reward!r:.80} of turn {number}; set a finite number"
    return None


def _wrong_pictures(returned: Trajectory, servers: Servers) -> str | None:
    observed = [token for part in returned.parts if isinstance(part, Observation) for token in part.output_ids]
    found = sum(token in servers.placeholders for token in (*returned.prompt_ids, *observed))
    expected = sum(picture.num_tokens for picture in returned.pictures)
    if found == expected:
        return None
    return (
        f"returned {found} placeholders for pictures of {expected}; give pictures with the tokens in which they stand: "
        "tools.encode(text, pictures), trajectory.observe(ids, pictures)"
    )
