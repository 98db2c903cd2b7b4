"""Trains on a task of reasoning-gym, with a second try after a wrong answer.

python -m venv envs/reasoning-gym && envs/reasoning-gym/bin/pip install reasoning-gym openai
scalerl train ... actor_rollout_ref.rollout.program.command='envs/reasoning-gym/bin/python reasoning_gym_task.py'

The row names the data set in extra_info["task"], such as chain_sum; its uid is the seed of the question.
"""

import json
import os
import sys

import reasoning_gym
from openai import OpenAI


def main() -> None:
    row = json.load(sys.stdin)
    http = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    task = reasoning_gym.create_dataset(row["extra_info"]["task"], size=1, seed=row["uid"])
    messages, scores = [{"role": "user", "content": task[0]["question"]}], []
    for _ in range(2):
        answer = http.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        scores.append(float(task.score_answer(answer, task[0])))
        if scores[-1] == 1.0:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Wrong. Try again."}]
    print(json.dumps({"score": max(scores), "first_try": scores[0]}))


if __name__ == "__main__":
    main()
