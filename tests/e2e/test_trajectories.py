"""Samples of several trajectories in whole runs: the numbers of a sample do not depend on what it is divided into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept

STEPS = 2
ROLLOUT = "actor_rollout_ref.rollout"
# One conversation, whole and divided after its first turn; and two agents, one of which helps the other.
PROGRAMS = """
async def whole(prompt, servers, tools):
    trajectory = servers.begin()
    await servers.generate(trajectory, max_new_tokens=3)
    trajectory.observe(tools.encode("="))
    await servers.generate(trajectory)
    return trajectory

async def divided(prompt, servers, tools):
    first = servers.begin()
    await servers.generate(first, max_new_tokens=3)
    second = first.branch()
    second.observe(tools.encode("="))
    await servers.generate(second)
    return [first, second]

def in_turn(turn, share):
    turn.reward = share * (sum(turn.output_ids) % 4)
    return turn

async def rewarded(prompt, servers, tools):
    trajectory = servers.begin()
    turn = in_turn(await servers.generate(trajectory, max_new_tokens=3), 0.5)
    trajectory.observe(tools.encode("="))
    if sum(turn.output_ids) % 3:
        in_turn(await servers.generate(trajectory, max_new_tokens=2), 0.25)
    trajectory.observe(tools.encode("="))
    await servers.generate(trajectory)
    trajectory.reward = float(sum(trajectory.token_ids) % 3)
    return trajectory

async def rewarded_and_divided(prompt, servers, tools):
    first = servers.begin()
    turn = in_turn(await servers.generate(first, max_new_tokens=3), 0.5)
    second = first.branch()
    second.observe(tools.encode("="))
    if sum(turn.output_ids) % 3:
        in_turn(await servers.generate(second, max_new_tokens=2), 0.25)
    second.observe(tools.encode("="))
    await servers.generate(second)
    second.reward = float(sum(second.token_ids) % 3)
    return [first, second]

async def of_two(prompt, servers, tools):
    helper, own = servers.begin(tools.encode("1+1="), agent="helper"), servers.begin(agent="writer")
    hint = await servers.generate(helper, max_new_tokens=2)
    own.observe(hint.output_ids)
    await servers.generate(own)
    own.reward = float(sum(own.token_ids) % 3)
    helper.reward, helper.extra = -own.reward, {"hint": len(hint.output_ids)}
    return [helper, own]
"""
# What is of trajectories and not of samples: how long a row is, and how rows are packed.
OF_ROWS = ("response_length", "response/", "prompt_length", "num_trajectories/", "packing/", "global_seqlen/")
ESTIMATORS = {
    "seq-mean-token-mean": ["algorithm.adv_estimator=grpo"],
    "token-mean": ["algorithm.adv_estimator=opo", "actor_rollout_ref.actor.use_kl_loss=true"],
    "seq-mean-token-sum": ["algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=true"],
}


def train(inputs: Inputs, kept: Kept, directory: Path, program: str, *more: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "programs.py").write_text(PROGRAMS)
    overrides = inputs.overrides(
        directory / "run",
        f"{ROLLOUT}.program.path={directory / 'programs.py'}",
        f"{ROLLOUT}.program.name={program}",
        "data.max_response_length=12",
        f"trainer.total_training_steps={STEPS}",
        *more,
    )
    finished = kept.train(overrides)
    assert finished.code == 0, finished.tail()
    return directory / "run"


def rows_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()


def sampled(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, float, float]]]:
    """(group, sample) -> token, log-prob and advantage of what the policy sampled, over all rows of the sample."""
    tokens: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for row in rows:
        columns = zip(row["response_mask"], row["input_ids"], row["rollout_logprobs"], row["advantages"], strict=True)
        own = [tuple(values) for is_sampled, *values in columns if is_sampled]
        tokens.setdefault((row["uid"], row["sample_index"]), []).extend(own)
    return tokens


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("seq-mean-token-mean", "dp2"),
        pytest.param("token-mean", "one", marks=pytest.mark.full),
        pytest.param("seq-mean-token-sum", "tp2", marks=pytest.mark.full),
    ],
)
def test_a_conversation_is_learned_alike_whole_and_divided(
    inputs: Inputs, kept: Kept, tmp_path: Path, mode: str, layout: str
) -> None:
    """What both trajectories have in common is trained once, and a sample weighs no more for having two."""
    more = [f"actor_rollout_ref.actor.loss_agg_mode={mode}", *ESTIMATORS[mode]]
    whole = train(inputs, kept, tmp_path / "whole", "whole", *more)
    own = [] if layout == "one" else ["trainer.n_gpus_per_node=2"]
    own += ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"] if layout == "tp2" else []
    divided = train(inputs, kept, tmp_path / "divided", "divided", *more, *own)
    for step in range(1, STEPS + 1):
        expected, rows = sampled(rows_of(whole, step)), rows_of(divided, step)
        assert len(rows) == 2 * PROMPTS * SAMPLES and [row["trajectory_index"] for row in rows[:4]] == [0, 1, 0, 1]
        found = sampled(rows)
        assert found.keys() == expected.keys() and any(
            advantage for tokens in expected.values() for *_, advantage in tokens
        )
        for name, tokens in expected.items():
            assert [token for token, *_ in found[name]] == [token for token, *_ in tokens]
            for values, wanted in zip(found[name], tokens, strict=True):
                assert values[1:] == pytest.approx(wanted[1:], abs=1e-5)
    logged, wanted = Record.read(divided).final, Record.read(whole).final
    same = ("actor/", "critic/score/", "critic/rewards/", "num_turns/", "reward/", "val-", "training/groups/")
    for step in range(STEPS + 1):
        compared = {
            name: value
            for name, value in wanted[step].items()
            # Means of rows, before the update's, which weighs them as the loss.
            if name.startswith(same) and name != "actor/entropy_loss"
        }
        assert {name: logged[step][name] for name in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6)
    assert all(wanted[step]["actor/grad_norm"] > 0 for step in range(1, STEPS + 1)), "this would prove nothing"
    assert logged[1]["num_trajectories/mean"] == 2 and "num_trajectories/mean" not in wanted[1]


@pytest.mark.parametrize(
    ("estimator", "layout"),
    [
        (["algorithm.adv_estimator=grpo", "algorithm.turn_level=true", "algorithm.gamma=0.5"], "dp2"),
        pytest.param(["algorithm.adv_estimator=reinforce_plus_plus"], "tp2", marks=pytest.mark.full),
        pytest.param(["algorithm.adv_estimator=rloo", "algorithm.turn_level=true"], "tp2", marks=pytest.mark.full),
    ],
)
def test_turns_are_rewarded_alike_whole_and_divided(
    inputs: Inputs, kept: Kept, tmp_path: Path, estimator: list[str], layout: str
) -> None:
    """On one process whole, on two divided: the advantage of each token, and what an update makes of them."""
    more = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", *estimator]
    whole = train(inputs, kept, tmp_path / "whole", "rewarded", *more)
    own = ["trainer.n_gpus_per_node=2"]
    own += ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"] if layout == "tp2" else []
    divided = train(inputs, kept, tmp_path / "divided", "rewarded_and_divided", *more, *own)
    for step in range(1, STEPS + 1):
        rows, found = rows_of(whole, step), sampled(rows_of(divided, step))
        expected = sampled(rows)
        assert found.keys() == expected.keys()
        for name, tokens in expected.items():
            for values, wanted in zip(found[name], tokens, strict=True):
                assert values == pytest.approx(wanted, abs=1e-5)
        for row in rows:
            assert len(row["turn_lengths"]) == len(row["turn_rewards"]) == row["num_turns"] in (2, 3)
            response = row["input_ids"][row["prompt_length"] :]
            assert row["score"] == pytest.approx(sum(response) % 3 + sum(row["turn_rewards"]))
        of_turns = {tuple(row["turn_rewards"]) for row in rows}
        assert len(of_turns) > 4 and any(any(rewards) for rewards in of_turns), "this would prove nothing"
    logged, wanted = Record.read(divided).final, Record.read(whole).final
    for step in range(1, STEPS + 1):
        compared = {
            name: value
            for name, value in wanted[step].items()
            if name.startswith(("actor/", "critic/", "num_turns/")) and name != "actor/entropy_loss"
        }
        assert {name: logged[step][name] for name in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6)
        assert wanted[step]["actor/grad_norm"] > 0


@pytest.mark.full
def test_a_critic_learns_rewards_of_turns_on_two_ranks_as_on_one(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """An estimator of tokens finds the reward of a turn at its last token."""
    more = ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8", "critic.optim.lr=1e-3"]
    one = train(inputs, kept, tmp_path / "one", "rewarded", *more)
    sizes = [f"{role}.megatron.tensor_model_parallel_size=2" for role in ("actor_rollout_ref.actor", "critic")]
    two = train(inputs, kept, tmp_path / "two", "rewarded", *more, "trainer.n_gpus_per_node=2", *sizes)
    for step in range(1, STEPS + 1):
        expected, found = sampled(rows_of(one, step)), sampled(rows_of(two, step))
        assert found.keys() == expected.keys()
        for name, tokens in expected.items():
            for values, wanted in zip(found[name], tokens, strict=True):
                assert values == pytest.approx(wanted, abs=1e-5)
    logged, wanted = Record.read(two).final, Record.read(one).final
    for step in range(1, STEPS + 1):
        compared = {name: value for name, value in wanted[step].items() if name.startswith(("actor/", "critic/"))}
        assert {name: logged[step][name] for name in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5)
        assert wanted[step]["critic/grad_norm"] > 0 and wanted[step]["actor/grad_norm"] > 0


def test_agents_have_scores_and_prompts_of_their_own(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    run_dir = train(
        inputs, kept, tmp_path, "of_two", "trainer.n_gpus_per_node=2", "algorithm.filter_groups.enable=true"
    )
    rows, logged = rows_of(run_dir, 1), Record.read(run_dir).final
    assert [row["agent"] for row in rows[:4]] == ["helper", "writer"] * 2
    by_agent = {agent: [row for row in rows if row["agent"] == agent] for agent in ("helper", "writer")}
    for agent, own in by_agent.items():
        assert len(own) == PROMPTS * SAMPLES
        for row in own:
            group = [other["score"] for other in own if other["uid"] == row["uid"]]
            is_above = row["score"] > sum(group) / len(group)
            assert {value > 0 for value in row["advantages"] if value} <= {is_above}, agent
    for helper, writer in zip(by_agent["helper"], by_agent["writer"], strict=True):
        hint = helper["input_ids"][helper["prompt_length"] :]
        assert helper["prompt"] == "1+1=" and helper["score"] == -writer["score"]
        assert writer["input_ids"][writer["prompt_length"] :][: len(hint)] == hint
        assert json.loads(helper["reward_extra"]) == {"hint": len(hint)}
    assert logged[1]["training/rollout_probs_diff_max"] < 1e-5
    cores = {name for name in logged[0] if name.startswith("val-core/")}
    assert {name.split("/")[3] for name in cores} == {"helper", "writer"}, "arithmetic/add is their data source"
