"""The examples of connectors: agents of other frameworks, each in its virtual environment and in the sandbox."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalerl.config.schema import ProgramConfig
from scalerl.data import PromptRow
from scalerl.data.chat import encode
from scalerl.rollout.load_program import load_program
from scalerl.rollout.program import Ask, Sample, Servers, Tools, attempt_program
from scalerl.rollout.servers.requests import GenerateOutput, SamplingParams
from tests.tiny_models import tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "connectors"
# `.ci/run` makes them.
ENVIRONMENTS = Path(sys.prefix) / "optional"
END = 2
TOKENIZER = tiny_tokenizer()
PROMPT = PromptRow(3, [1, 2], 2, "source", "42", {}, [{"role": "user", "content": "What is 6 * 7?"}], "rule")


def sample_of(example: str, environment: str, says: Callable[[str], str], **row: Any) -> Sample:
    """One sample of an example, of a policy that says what follows from the text before its turn."""

    async def turn(sample: Servers, number: int, ask: Ask) -> GenerateOutput:
        text = str(TOKENIZER.decode(ask.input_ids))
        ids, reason = [*encode(TOKENIZER, [says(text)])[0], END], "stop"
        for end in ask.sampling.stop:
            # As a server does: it ends with the text that stops it.
            if end in (said := says(text)):
                ids = encode(TOKENIZER, [said[: said.index(end) + len(end)]])[0]
        return GenerateOutput("r", number, ids, [-0.5] * len(ids), reason, 4)

    python = ENVIRONMENTS / f"agents-{environment}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: .ci/run makes it")
    config = ProgramConfig(command=shlex.join([str(python), str(EXAMPLES / example)]), timeout_s=300)
    sampling, servers_row = SamplingParams(100_000), replace(PROMPT, **row)
    servers = Servers(turn, servers_row.input_ids, sampling, uid=7, sample_index=1, seed=5)
    sample = asyncio.run(attempt_program(load_program(config), servers_row, servers, Tools(TOKENIZER, 0), config))
    assert sample.error is None, sample.error
    return sample


def trained(sample: Sample) -> list[str]:
    """What the policy said, and is trained, in each trajectory."""
    return ["|".join(str(TOKENIZER.decode(turn.output_ids)) for turn in each.turns) for each in sample.trajectories]


def test_smolagents_runs_code() -> None:
    def says(text: str) -> str:
        if "Observation" in text.rpartition("What is 6 * 7?")[2]:
            return "Thought: done\n<code>\nfinal_answer(answer)\n</code>"
        return "Thought: compute\n<code>\nanswer = 6 * 7\nprint(answer)\n</code>"

    sample = sample_of("smolagents_code.py", "smolagents", says)
    assert sample.trajectories[-1].reward == 1.0 and sample.trajectories[-1].extra["num_steps"] == 3
    # It rewrites an answer before it goes on, so that each step is a trajectory.
    assert [said.count("<code>") for said in trained(sample)] == [1, 1]


@pytest.mark.full
def test_textarena_lets_the_policy_play_with_itself() -> None:
    def says(text: str) -> str:
        free = text.rpartition("Available Moves: ")[2].partition("\n")[0]
        return "I take " + free.partition("'")[2].partition("'")[0]

    sample = sample_of("textarena_game.py", "textarena", says, extra_info={"game": "TicTacToe-v0"})
    # Each takes the first free square: the first player has 0, 2, 4 and 6, which is a line.
    second, first = trained(sample)
    assert (first.count("I take"), second.count("I take")) == (4, 3)
    scores = {each.agent: (each.reward, each.extra["num_moves"]) for each in sample.trajectories}
    assert scores == {"first": (1.0, 4), "second": (-1.0, 3)}


def test_reasoning_gym_gives_a_second_try() -> None:
    def says(text: str) -> str:
        if "Wrong" not in text:
            return "I do not know"
        return str(sum(map(int, re.findall(r"[+-]? ?\d+", text.partition(" =")[0].replace(" ", "")))))

    sample = sample_of("reasoning_gym_task.py", "reasoning-gym", says, extra_info={"task": "chain_sum"})
    (said,) = trained(sample)
    assert said.startswith("I do not know") and sample.trajectories[0].reward == 1.0
    assert sample.trajectories[0].extra["first_try"] < 1.0
    assert json.dumps(sample.trajectories[0].extra)


FILES = {
    "calculator.py": "def add(a, b):\n    return a - b\n",
    "test_calculator.py": "from calculator import add\nimport unittest\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n",
}


@pytest.mark.full
@pytest.mark.parametrize("mends", [True, False])
def test_mini_swe_agent_mends_a_repository(mends: bool) -> None:
    """And a policy that spoils the tests in place of the code has no score."""
    mend = "sed -i 's/a - b/a + b/' calculator.py" if mends else "echo > test_calculator.py; env | grep -c API_KEY"
    commands = ["cat *.py", mend, "python3 -m unittest -q 2>&1", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]

    def says(text: str) -> str:
        command = commands[min(text.count("<returncode>"), 3)]
        return f"Next.\n```mswea_bash_command\n{command}\n```"

    info = {"files": FILES, "test": "python3 -m unittest -q"}
    messages = [{"role": "user", "content": "add is wrong"}]
    sample = sample_of("mini_swe_agent.py", "mini-swe-agent", says, extra_info=info, messages=messages)
    (said,) = trained(sample)
    assert said.count("mswea_bash_command") == 4
    last = sample.trajectories[-1]
    assert (last.reward, last.extra) == (float(mends), {"submitted": True})
    shown = [str(TOKENIZER.decode(part.output_ids)) for part in last.parts]
    assert mends or "<returncode>1</returncode>\n<output>\n0\n" in shown[3]


@pytest.mark.full
def test_verifiers_gives_the_reward_of_its_task() -> None:
    def says(text: str) -> str:
        return "42" if "Check it" in text else "perhaps 41"

    sample = sample_of("verifiers_task.py", "verifiers", says)
    (said,) = trained(sample)
    assert said.startswith("perhaps 41") and "|42" in said
    assert sample.trajectories[0].reward == 1.0
