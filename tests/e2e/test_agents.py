"""Agents in whole runs: any client of OpenAI's API, and each token as it was sampled."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from scalerl.extras.report.page import timelines
from scalerl.extras.report.run_files import read_run
from tests.e2e import asking_agent
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept

STEPS = 2
ROLLOUT = "actor_rollout_ref.rollout"
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
AGENTS = Path(asking_agent.__file__).read_text(encoding="utf-8")
COMMAND = f"""{AGENTS}
import json, os, sys, types

row = types.SimpleNamespace(**json.load(sys.stdin))
print(json.dumps(in_a_thread(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row)))
"""

IN_CONTAINERS = """
from openai import AsyncOpenAI
from scalerl.rollout.program import EnvironmentFailed

async def agent(base_url, api_key, row):
    http = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": row.messages[-1]["content"]}]
    answer = await http.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    # Of the sample alone, so that it fails in every attempt.
    if row.extra_info["split"] == "train" and len(answer.choices[0].message.content) % 4 == 0:
        raise EnvironmentFailed("no container is free")
    return float(sum(map(ord, answer.choices[0].message.content)) % 3)

async def dead(base_url, api_key, row):
    raise EnvironmentFailed(f"no container is free")
"""

GAME = """
from openai import AsyncOpenAI

async def game(base_url, api_key, row):
    http = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def play(player, text):
        messages = [{"role": "user", "content": text or "0"}]
        answer = await http.chat.completions.create(model=f"policy:{player}", messages=messages, max_tokens=4)
        return answer.choices[0].message.content

    white = await play("white", row.messages[-1]["content"])
    black = await play("black", white)
    for player, text in (("white", white), ("black", black)):
        reward = float(sum(map(ord, text)) % 3)
        body = {"reward": reward, "agent": player, "extra": {"posted": reward}}
        await http.post("/reward", cast_to=object, body=body)
"""


def train(inputs: Inputs, kept: Kept, directory: Path, name: str, *more: str, text: str = AGENTS) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "agents.py").write_text(text)
    finished = kept.train(
        inputs.overrides(
            directory / "run",
            f"{ROLLOUT}.program.path={directory / 'agents.py'}",
            f"{ROLLOUT}.program.name={name}",
            "data.max_prompt_length=32",
            "data.max_response_length=24",
            f"trainer.total_training_steps={STEPS}",
            *more,
        )
    )
    assert finished.code == 0, finished.tail()
    return directory / "run"


def rows_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()


def test_every_trained_token_is_as_it_was_sampled(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """On the joined tokens of a conversation transformers has the log-probs of the sampler, in each turn of it."""
    from transformers import AutoModelForCausalLM

    run_dir = train(inputs, kept, tmp_path, "agent", "trainer.n_gpus_per_node=2")
    rows, logged = rows_of(run_dir, 1), Record.read(run_dir).final
    assert len(rows) == 2 * PROMPTS * SAMPLES and {row["num_turns"] for row in rows} == {1, 2}
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32).eval()
    num_compared = 0
    for row in rows:
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["response_mask"])[1:]
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["rollout_logprobs"])[1:][mask], logprobs[mask], atol=1e-5, rtol=0)
        num_compared += int(mask.sum())
    assert num_compared == sum(row["num_sampled_tokens"] for row in rows) > 0
    for step in range(1, STEPS + 1):
        assert logged[step]["training/rollout_probs_diff_max"] < 1e-5 and logged[step]["actor/grad_norm"] > 0
        assert logged[step]["num_turns/mean"] == 3 and logged[step]["reward_extra/num_calls"] == 3

    # The same run explained: requests of every agent in its program, on a server, before the passes of the ranks.
    timeline = read_run(run_dir).timeline
    assert sorted(timeline) == list(range(1, STEPS + 1))
    for spans in timeline.values():
        update = next(span for span in spans if span[:2] == ("trainer rank 0", "actor update_actor"))
        servers = {span.who for span in spans if span.what == "generate"}
        samples = {span.who for span in spans if span.who.startswith("sample ")}
        assert len(samples) == PROMPTS * SAMPLES
        for who in samples:
            mine = [span for span in spans if span.who == who]
            (program,) = (span for span in mine if span.what == "program")
            turns = [span for span in mine if span.what == "turn"]
            assert sorted(span.about["turn"] for span in turns) == [0, 1, 2]
            assert {f"server {span.about['server']}" for span in turns} <= servers
            assert all(program.begin_s <= span.begin_s < span.end_s <= program.end_s + 1e-3 for span in turns)
            assert program.end_s <= update.begin_s
    for section in timelines(read_run(run_dir)):
        assert re.search(r"All waited for sample \d+\.\d+ at the end: .* in 3 turns of the policy", section.says[-1])
        drawn = {trace["name"] for trace in section.figures[0]["data"]}
        assert {"program", "turn", "prefill", "decode", "generate", "update_actor", "reward"} <= drawn


@pytest.mark.full
def test_threads_coroutines_and_commands_have_the_same_numbers(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """With the embedded engine a run of agents is one run, however they wait and whoever is first."""
    runs = [train(inputs, kept, tmp_path / name, name) for name in ("agent", "in_a_thread")]
    command = shlex.join([sys.executable, str(tmp_path / "command" / "agents.py")])
    more = [f"{ROLLOUT}.program.command={command}", f"{ROLLOUT}.program.path=null", f"{ROLLOUT}.program.timeout_s=300"]
    runs.append(train(inputs, kept, tmp_path / "command", "unused", *more, text=COMMAND))
    for step in range(1, STEPS + 1):
        ours, *others = (rows_of(run_dir, step) for run_dir in runs)
        assert [ours] * 2 == others


def test_samples_whose_surroundings_fail_are_left_out(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """They are in no mean, train nothing, and are counted; the others of their groups have their own advantages."""
    more = ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.program.max_failed_frac=0.9"]
    run_dir = train(inputs, kept, tmp_path, "agent", *more, text=IN_CONTAINERS)
    num_left_out = 0
    for step, logged in Record.read(run_dir).final.items():
        rows = rows_of(run_dir, step) if step else []
        left_out = [row for row in rows if row["reward_failed"]]
        num_left_out += len(left_out)
        assert logged.get("rollout/num_left_out", 0) == len(left_out) and logged.get("reward/num_failed", 0) == 0
        assert all(row["num_sampled_tokens"] == row["response_length"] == 0 for row in left_out)
        assert all(row["reward_error"] == "environment: no container is free" for row in left_out)
        scores = [row["score"] for row in rows if not row["reward_failed"]]
        if step:
            assert logged["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
            assert logged["timing_s/gen/tools/max"] >= logged["timing_s/gen/tools/mean"] >= 0
    assert 0 < num_left_out < STEPS * PROMPTS * SAMPLES


def test_each_agent_of_a_game_has_the_reward_that_is_posted_for_it(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """It is compared with the same agent's in the other samples of the group."""
    run_dir = train(inputs, kept, tmp_path, "game", text=GAME)
    differ = False
    for step in range(1, STEPS + 1):
        rows = rows_of(run_dir, step)
        assert len(rows) == 2 * PROMPTS * SAMPLES
        of_agent: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for row in rows:
            assert row["score"] == json.loads(row["reward_extra"])["posted"]
            advantage = next(a for a, mask in zip(row["advantages"], row["response_mask"], strict=True) if mask)
            of_agent.setdefault((row["uid"], row["agent"]), []).append((row["score"], advantage))
        assert {agent for _, agent in of_agent} == {"white", "black"} and len(of_agent) == 2 * PROMPTS
        for mine in of_agent.values():
            assert len(mine) == SAMPLES and sum(advantage for _, advantage in mine) == pytest.approx(0, abs=1e-4)
            mean = sum(score for score, _ in mine) / SAMPLES
            assert all((score > mean) == (advantage > 1e-6) for score, advantage in mine)
        differ = differ or any(len({score for score, _ in mine}) > 1 for mine in of_agent.values())
    assert differ, "no group shows a difference"


def test_a_dead_environment_is_told_in_one_line(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(IN_CONTAINERS)
    program = [f"{ROLLOUT}.program.path={tmp_path / 'agents.py'}", f"{ROLLOUT}.program.name=dead"]
    finished = kept.train(inputs.overrides(tmp_path / "run", *program))
    assert finished.code != 0
    assert "16 of 16 samples have no result, more than" in finished.stderr, finished.tail()
    assert finished.stderr.count("no container is free") <= 2, finished.tail()


@pytest.mark.full
def test_256_agents_at_once_lose_and_double_nothing(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    more = ["data.train_batch_size=32", f"{ROLLOUT}.n=8", f"{ROLLOUT}.num_replicas=2", f"{ROLLOUT}.num_workers=2"]
    for name in ("agent", "in_a_thread"):
        run_dir = train(inputs, kept, tmp_path / name, name, *more, "trainer.total_training_steps=1")
        rows = rows_of(run_dir, 1)
        assert len({(row["uid"], row["sample_index"], row["trajectory_index"]) for row in rows}) == len(rows) == 512


@pytest.mark.full
@pytest.mark.parametrize("name", re.findall(r"^(?:async )?def (\w+)\(base_url", PAGE, re.MULTILINE))
def test_the_agents_of_the_page_train(inputs: Inputs, kept: Kept, tmp_path: Path, name: str) -> None:
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if f"def {name}(" in block]
    run_dir = train(inputs, kept, tmp_path, name, text=block)
    assert Record.read(run_dir).final[STEPS]["actor/grad_norm"] > 0


RECIPE = """
hydra:
  searchpath: ['file://verl/trainer/config']
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 32
  max_response_length: 40
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    multi_turn:
      enable: True
      format: hermes
      max_assistant_turns: 3
"""
OF_VERL = """
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Adder(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.0, {}

class AgainInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.truth = kwargs["ground_truth"]
        return "one"

    async def generate_response(self, instance_id, messages, **kwargs):
        # A policy that is not trained is right by chance.
        return messages[-1]["content"] == kwargs["ground_truth"], "=", 0.5, {}
"""
TOOLS_OF_VERL = """
tools:
  - class_name: classes.Adder
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: add
        description: Adds.
        parameters: {type: object, properties: {a: {type: integer}, b: {type: integer}}, required: [a, b]}
"""

INTERACTION_OF_VERL = """
interaction:
  - name: again
    class_name: classes.AgainInteraction
    config: {}
"""


def test_an_agent_script_of_verl_runs_as_it_is(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """Its configuration file with verl's defaults, its files of tools and interactions, its classes and its rows."""
    for name, text in {"recipe": RECIPE, "tools": TOOLS_OF_VERL, "interaction": INTERACTION_OF_VERL}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "classes.py").write_text(OF_VERL)
    files = {}
    for kind, path in (("train", inputs.train), ("val", inputs.val)):
        rows = pq.read_table(path).to_pylist()
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            row["extra_info"] |= {"interaction_kwargs": {"name": "again", "ground_truth": truth}}
        files[kind] = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), files[kind])
    more = [f"data.{kind}_files={path}" for kind, path in files.items()]
    turns = f"{ROLLOUT}.multi_turn"
    more += [f"{turns}.tool_config_path={tmp_path / 'tools.yaml'}", f"data.tool_config_path={tmp_path / 'tools.yaml'}"]
    more += [f"{turns}.interaction_config_path={tmp_path / 'interaction.yaml'}", "trainer.total_training_steps=1"]
    # The model's chat template shows no tools.
    more.append("data.unknown_tokens=allow")
    arguments = ["--config-path", str(tmp_path), "--config-name", "recipe", *inputs.overrides(tmp_path / "run", *more)]
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    logged = Record.read(tmp_path / "run").final[1]
    # An untrained policy seldom ends an answer.
    assert logged["num_turns/mean"] > 1 and logged["reward_extra/num_tool_calls"] == 0
    assert logged["actor/grad_norm"] > 0 and logged["training/rollout_probs_diff_max"] < 1e-5
    scores = [json.loads(row["reward_extra"])["turn_scores"] for row in rows_of(tmp_path / "run", 1)]
    assert max(map(len, scores)) == 1 and {score for each in scores for score in each} == {0.5}
