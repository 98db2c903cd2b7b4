"""Trains both players of a game of TextArena, each in a conversation of its own.

python -m venv envs/textarena && envs/textarena/bin/pip install textarena
scalerl train ... actor_rollout_ref.rollout.program.command='envs/textarena/bin/python textarena_game.py'

The row names a game of two players in extra_info["game"], such as TicTacToe-v0. The first player's reward is the score.
"""

import json
import os
import sys

import textarena
from openai import OpenAI


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
        answer = http.chat.completions.create(model="policy", messages=messages[player])
        messages[player].append({"role": "assistant", "content": answer.choices[0].message.content})
        is_over, _ = game.step(answer.choices[0].message.content)
    rewards, _ = game.close()
    print(json.dumps({"score": float(rewards[0]), "num_moves": sum(map(len, messages)) // 2}))


if __name__ == "__main__":
    main()
