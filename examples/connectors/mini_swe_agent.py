"""Trains mini-swe-agent: the policy mends a repository by shell commands, and its tests are the score.

python -m venv envs/mini-swe-agent && envs/mini-swe-agent/bin/pip install mini-swe-agent
scalerl train ... actor_rollout_ref.rollout.program.command='envs/mini-swe-agent/bin/python mini_swe_agent.py'

The row has the files in extra_info["files"] (name -> text) and the command of their tests in extra_info["test"]. The
repository is made for each sample; the tests run on the files as the row has them, whatever the policy wrote there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = """\
You work in a shell. Answer with a thought and exactly one command:
```mswea_bash_command
ls
```
When you are done, the command is: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"""


def main() -> None:
    row = json.load(sys.stdin)
    repository, files = Path("repository").absolute(), row["extra_info"]["files"]
    write(repository, files)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    # Without the key: what the policy runs shall not talk to the endpoint.
    key, base_url = os.environ.pop("OPENAI_API_KEY"), os.environ.pop("OPENAI_BASE_URL")
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        os.environ.pop(name, None)
    model = LitellmTextbasedModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": key},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(repository)),
        system_template=SYSTEM,
        instance_template="{{task}}",
        step_limit=10,
    )
    ended = agent.run(row["messages"][-1]["content"])
    write(repository, {name: text for name, text in files.items() if "test" in name})
    test = subprocess.run(row["extra_info"]["test"], shell=True, cwd=repository, capture_output=True, timeout=60)
    print(json.dumps({"score": float(test.returncode == 0), "submitted": ended.get("exit_status") == "Submitted"}))


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


if __name__ == "__main__":
    main()
