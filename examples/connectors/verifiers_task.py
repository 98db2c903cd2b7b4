"""Trains on a task of verifiers: its rewards are the score, and the policy answers in a harness.

python -m venv envs/verifiers && envs/verifiers/bin/pip install verifiers
scalerl train ... actor_rollout_ref.rollout.program.command='envs/verifiers/bin/python verifiers_task.py'

The harness here asks twice. A harness of verifiers' own that starts a program takes `uv` and packages of that program,
which the sandbox has where program.read_only_paths names them.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["TwoTurns"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        http = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt_text}]
        for _ in range(2):
            answer = await http.chat.completions.create(model=ctx.model, messages=messages)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Check it, and give the number alone."},
            ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main() -> None:
    row = json.load(sys.stdin)
    config = vf.AgentConfig(
        # This file is the module of the harness.
        harness=vf.HarnessConfig(id="verifiers_task"),
        runtime=vf.SubprocessConfig(),
        model="policy",
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(SumTask(Sum(prompt=row["messages"][-1]["content"], answer=str(row["ground_truth"]))))
    if trace.errors:
        sys.exit(str(trace.errors[0].message))
    print(json.dumps({"score": trace.reward}))


if __name__ == "__main__":
    asyncio.run(main())
