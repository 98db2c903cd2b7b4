"""Trains smolagents' CodeAgent: the policy writes Python, sees what it printed, and gives an answer.

python -m venv envs/smolagents && envs/smolagents/bin/pip install smolagents openai
scalerl train ... actor_rollout_ref.rollout.program.command='envs/smolagents/bin/python smolagents_code.py'

smolagents adds a text to each answer before it asks again, so that each step of a sample is a trajectory.
"""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel


def main() -> None:
    row = json.load(sys.stdin)
    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = CodeAgent(tools=[], model=model, max_steps=4, verbosity_level=0)
    answer = agent.run(row["messages"][-1]["content"])
    print(json.dumps({"score": float(str(answer) == str(row["ground_truth"])), "num_steps": len(agent.memory.steps)}))


if __name__ == "__main__":
    main()
