"""Trains both players of a game of TextArena: each has a conversation, and a score of its name.

python -m venv envs/textarena && envs/textarena/bin/pip install textarena
scalerl train ... actor_rollout_ref.rollout.program.command='envs/textarena/bin/python textarena_game.py'

The row names a game of two players in extra_info["game"], such as TicTacToe-v0.
"""

import json
import os
import sys

import textarena
from openai import OpenAI

PLAYERS = ("first", "second")


def main() -> None:
    row = json.load(sys.stdin)
    http = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    game = textarena.make(row["extra_info"]["game"])
    game.reset(num_players=2, seed=row["uid"])
    seen, messages, is_over = ["", ""], [[], []], False
    while not is_over:
        player, observation = game.get_observation()
        # What a player has seen before stands in its conversation.
        messages[player].append({"role": "user", "content": observation[len(seen[player]) :].strip()})
        seen[player] = observation
        answer = http.chat.completions.create(model=f"policy:{PLAYERS[player]}", messages=messages[player])
        messages[player].append({"role": "assistant", "content": answer.choices[0].message.content})
        is_over, _ = game.step(answer.choices[0].message.content)
    rewards, _ = game.close()
    for player, reward in rewards.items():
        body = {"reward": float(reward), "agent": PLAYERS[player], "extra": {"num_moves": len(messages[player]) // 2}}
        http.post("/reward", cast_to=object, body=body)


if __name__ == "__main__":
    main()
