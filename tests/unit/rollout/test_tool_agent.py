"""The program in which the policy calls tools: what it is shown, what is counted, and classes written for verl."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from scalerl.base.user_code import UserCodeError
from scalerl.config.schema import ProgramConfig
from scalerl.data.chat import encode
from scalerl.rewards.errors import RewardError
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import Ask, EnvironmentFailed, Sample, Servers, Tools, Trajectory, run_program
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.embedded.parsers import parse_tool_calls
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from scalerl.rollout.tool_agent import shortened
from scalerl.rollout.tools import SearchTool
from tests.unit.rollout.gateway.test_gateway import END, PROMPT, TOKENIZER

# As in verl's examples.
CLASSES = """
from typing import Any, Optional
from uuid import uuid4
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op
from scalerl.rollout.program import EnvironmentFailed


class AnswerTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = {"ground_truth": ground_truth}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        if parameters["answer"] == "broken":
            raise EnvironmentFailed("the scorer is away")
        truth = self._instances[instance_id]["ground_truth"]
        reward = gsm8k.compute_score("#### " + parameters["answer"], truth, method="flexible")
        return ToolResponse(text=f"Current parsed {parameters['answer']!r} {reward=}"), reward - 0.5, {}

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]


class AgainInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.started = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs) -> str:
        self.started["only"] = ground_truth
        return "only"

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"].strip() == self.started[instance_id]
        return right, "wrong, again", float(right), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.started[instance_id]
"""
TOOLS = """
tools:
  - class_name: classes.AnswerTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: answer
        description: Checks an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer}}
          required: [answer]
  - class_name: scalerl.rollout.tools.PythonTool
    config: {wall_s: 20}
"""
INTERACTION = """
interaction:
  - name: again
    class_name: classes.AgainInteraction
    config: {}
"""
ROW = replace(
    PROMPT,
    extra_info={
        "need_tools_kwargs": True,
        "tools_kwargs": {"answer": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"name": "again", "ground_truth": "done"},
    },
)


class Client:
    """SGLang's parser in this process, as a server has it."""

    async def parse_tool_calls(self, text: str, parser: str, tools: list[Any]) -> tuple[str, list[dict[str, Any]]]:
        body = parse_tool_calls({"text": text, "tool_call_parser": parser, "tools": tools})
        return body["normal_text"], [{"name": c["name"], "arguments": c["parameters"]} for c in body["calls"]]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sample_of(directory: Path, answers: Sequence[str], *, tools: str = TOOLS, **config: Any) -> Sample:
    (directory / "classes.py").write_text(CLASSES)
    (directory / "tools.yaml").write_text(tools)
    (directory / "interaction.yaml").write_text(INTERACTION)

    async def turn(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        ids = [*encode(TOKENIZER, [answers[number]])[0], END][: ask.sampling.max_new_tokens]
        return GenerateOutput("r", 0, ids, [-0.5] * len(ids), "stop" if ids[-1] == END else "length", 4)

    servers = Servers(
        turn,
        PROMPT.input_ids,
        SamplingParams(1000),
        uid=7,
        sample_index=1,
        seed=5,
        ask_server=lambda ask: ask(cast(RolloutClient, Client())),
    )
    paths = {"tool_config_path": str(directory / "tools.yaml")} | config
    program = load_program(ProgramConfig(tool_call_parser="qwen25", **paths))
    return asyncio.run(run_program(program, ROW, servers, Tools(TOKENIZER, 0)))


def texts(sample: Sample) -> list[str]:
    (trajectory,) = sample.trajectories
    return [str(TOKENIZER.decode(part.output_ids)) for part in trajectory.parts]


def only(sample: Sample) -> Trajectory:
    (trajectory,) = sample.trajectories
    return trajectory


def test_the_policy_sees_what_tools_answer_until_it_calls_none(tmp_path: Path) -> None:
    """Classes as they were written for verl, and scalerl's own; each call has an instance of its own row."""
    answers = ["I try." + call("answer", answer="5"), call("python", code="print(2 + 2)"), "4"]
    sample = sample_of(tmp_path, answers)
    parts = texts(sample)
    assert parts[0].startswith("I try.<tool_call>") and "Current parsed '5' reward=0.0" in parts[1]
    assert "\n4" in parts[3] or parts[3].count("4") == 1
    assert parts[4].startswith("4") and len(parts) == 5
    assert only(sample).reward is None
    counted = {"num_tool_calls": 2, "num_tool_errors": 0, "tool_rewards": [-0.5, 0.0], "turn_scores": []}
    assert only(sample).extra == counted
    assert "verl" not in sys.modules


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (call("python", program="print(1)"), "Error: KeyError: 'code'"),
        (call("python", code="1 / 0"), "exit code 1: ZeroDivisionError: division by zero"),
        (call("answer"), "Error: KeyError: 'answer'"),
    ],
)
def test_a_call_that_fails_answers_with_its_error(
    tmp_path: Path, answer: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    sample = sample_of(tmp_path, [answer, "well"])
    assert said in texts(sample)[1] and only(sample).extra["num_tool_calls"] == 1
    # A program that ends badly is an answer of the tool.
    assert only(sample).extra["num_tool_errors"] == ("KeyError" in said)
    # The author of a tool may have to mend it.
    sample_of(tmp_path, [answer, "well"])
    lines = [record.getMessage() for record in caplog.records]
    assert [f"tool 'answer' raised KeyError ({tmp_path}/classes.py:" in line for line in lines] == (
        [True] if "'answer'" in said else []
    )


def test_limits_of_turns_calls_and_lengths(tmp_path: Path) -> None:
    two = call("answer", answer="1") + call("answer", answer="2")
    sample = sample_of(tmp_path, [two, two, "never asked"], max_assistant_turns=2, max_tool_response_length=10)
    parts = texts(sample)
    assert len(parts) == 3 and "Curre...(truncated)...d=0.0" in parts[1]
    assert only(sample).extra["num_tool_calls"] == 1
    sample = sample_of(tmp_path, [two, "end"], max_parallel_calls=2)
    assert texts(sample)[1].count("Current parsed") == 2
    # As verl cuts: left keeps the beginning.
    cut = [shortened("abcdef", 4, side) for side in ("left", "right", "middle")]
    assert cut == ["abcd...(truncated)", "(truncated)...cdef", "ab...(truncated)...ef"]
    assert shortened("abcd", 4, "left") == "abcd"


def test_an_interaction_answers_until_it_ends_the_conversation(tmp_path: Path) -> None:
    config = {"interaction_config_path": str(tmp_path / "interaction.yaml"), "tool_config_path": None}
    sample = sample_of(tmp_path, ["one", "two", "done", "never"], **config)
    assert ["wrong, again" in text for text in texts(sample)] == [False, True, False, True, False]
    assert only(sample).extra["turn_scores"] == [0.0, 0.0, 1.0]
    sample = sample_of(tmp_path, ["one", "two", "done"], max_user_turns=1, **config)
    assert len(texts(sample)) == 3


def test_half_a_character_in_a_call_is_no_end_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy may write one in JSON; it comes back in the tool's error, and no tokenizer takes it. Nothing logs it."""
    sample = sample_of(tmp_path, [call("python", code="raise ValueError('\ud800')"), call("\udc80"), "well"])
    assert only(sample).extra["num_tool_calls"] >= 1
    sample = sample_of(tmp_path, [call("answer", answer="\ud800"), "well"])
    assert "Current parsed" in texts(sample)[1]
    assert caplog.records == []


def test_a_mistake_in_an_interaction_is_told_with_its_line(tmp_path: Path) -> None:
    config = {"interaction_config_path": str(tmp_path / "broken.yaml"), "tool_config_path": None}
    (tmp_path / "broken.py").write_text(CLASSES.replace('right, "wrong, again", float(right), {}', "None"))
    (tmp_path / "broken.yaml").write_text(INTERACTION.replace("classes.", "broken."))
    message = r"(?s)interaction_config_path: AgainInteraction \(.*broken.py:.*raised TypeError: .*, on prompt"
    with pytest.raises(UserCodeError, match=message):
        sample_of(tmp_path, ["one"], **config)


def test_what_scalerl_itself_cannot_do_is_no_answer_of_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(*args: Any) -> None:
        raise RewardError("no namespaces here")

    monkeypatch.setattr("scalerl.rollout.tools.run_python", no_sandbox)
    with pytest.raises(RewardError, match="no namespaces here"):
        sample_of(tmp_path, [call("python", code="1"), "well"])


def test_what_is_around_a_tool_may_fail(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="the scorer is away"):
        sample_of(tmp_path, [call("answer", answer="broken")])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("tools: 3", "`tools` is no list of class_name and config; write one"),
        ("tools:\n  - class_name: classes.NoTool", r"tools\[0\]: AttributeError.*NoTool"),
        ("tools:\n  - class_name: classes.AnswerTool", r"tools\[0\]: ValueError: AnswerTool has no schema"),
        ("tools:\n  - config: {}", r"tools\[0\]: KeyError: 'class_name'"),
        ("tools:\n" + "  - class_name: PythonTool\n" * 2, r"tools\[1\]: another tool has the name 'python'"),
        ("tools:\n  - class_name: PythonTool\n    config: {wall: 3}", r"tools\[0\]: TypeError: .*'wall'"),
    ],
)
def test_a_file_that_is_wrong_is_told_before_the_start(tmp_path: Path, tools: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=f"tool_config_path=.*{message}"):
        sample_of(tmp_path, [], tools=tools)


def test_a_row_that_asks_for_an_interaction_that_is_not_there(tmp_path: Path) -> None:
    config = {"interaction_config_path": str(tmp_path / "other.yaml"), "tool_config_path": None}
    (tmp_path / "other.yaml").write_text(INTERACTION.replace("again", "other", 1))
    with pytest.raises(UserCodeError, match=r"asks for the interaction 'again' .*; there are other"):
        sample_of(tmp_path, [], **config)


def test_search_finds_documents_by_their_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"documents is d\.jsonl; give an absolute path"):
        SearchTool({"documents": "d.jsonl"}, None)
    documents = tmp_path / "documents.jsonl"
    rows = [{"title": "Rome", "text": "capital of Italy"}, {"text": "the capital of France is Paris"}, {"text": "x"}]
    documents.write_text("\n".join(map(json.dumps, rows)))
    tool = SearchTool({"documents": str(documents), "topk": 2}, None)
    found = asyncio.run(tool.execute("1", {"query": 'capital "of" France? OR (NEAR'}))[0].text
    assert found == "1. the capital of France is Paris\n2. Rome\ncapital of Italy"
    assert asyncio.run(tool.execute("1", {"query": "?!"}))[0].text == "nothing found"
    # Written once, and again when the documents are newer.
    before = (tmp_path / "documents.jsonl.fts5").stat().st_mtime_ns
    SearchTool({"documents": str(documents)}, None)
    assert (tmp_path / "documents.jsonl.fts5").stat().st_mtime_ns == before
    documents.write_text(json.dumps({"text": "Paris alone"}))
    assert SearchTool({"documents": str(documents)}, None).search("Paris") == [(1, ("", "Paris alone"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.jsonl", "documents.jsonl.fts5"]
