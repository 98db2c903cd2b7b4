"""What a newcomer waits for: `scalerl doctor`, a finished run that is started again, a trained model's first answer.

python benchmarks/first_hour.py                                       # five minutes on two cores
python benchmarks/first_hour.py --repeats 1 --warmup 0 --steps 1      # a look

The commands of README's "Your own run", each in processes of its own, on the CPU: `scalerl init` for an untrained model
of examples/arithmetic, and a short `scalerl train`. Then, in turn:
- `scalerl doctor`;
- the run's command once more, which says that the run is finished;
- from the run's end to an answer: `scalerl merge` of its last checkpoint, `scalerl serve` of that model on 127.0.0.1, a
  chat request over HTTP.

The limit in the same run: Python that does nothing, and the imports of each command, alone in a Python. All that is
started has ended when the benchmark ends, however it ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

if TYPE_CHECKING:
    from tests.e2e.jobs import Job

EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"
TIMEOUT_S = 900.0
POLL_S = 0.01
HOST = "127.0.0.1"
# What the slowest round may take.
AIMS_S = {"doctor": 5.0, "finished": 1.0, "answer": 60.0}
# Of doctor and serve those of the process below the command's that both wait for.
IMPORTS = {
    "doctor": "import torch",
    "finished": "import scalerl.trainer.main_ppo",
    "merge": "import scalerl.merge.command",
    "serve": "import sglang.srt.entrypoints.http_server",
}
QUESTION = "12+5="
ANSWER_TOKENS = 8


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="of the run that is finished")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; in each, everything once")
    parser.add_argument("--warmup", type=int, default=1, help="untimed rounds before them")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-first-hour-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # So that `timeout` or a scheduler leaves nothing behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["HF_HUB_OFFLINE"] = "1"
    ran_on = record.machine("cpu", now=options.now)
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name, Commands(Path(name).resolve()) as commands:
        result = measure(options, commands, commands.directory)
    print(report(result))
    return record.keep("first_hour", arguments, vars(options), ran_on, result, device="cpu")


class Commands:
    """Starts commands in a directory.  At the end none of their processes is left; those of a failure are killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[Job] = []

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for job in self.jobs:
                    job.assert_gone()
        finally:
            for job in self.jobs:
                job.kill_all()

    def start(self, *arguments: str) -> Job:
        from tests.e2e.jobs import Job

        self.jobs.append(Job(arguments, self.directory))
        return self.jobs[-1]

    def run(self, *arguments: str) -> tuple[dict[str, float], str]:
        """The command's wall and processor seconds, and what it printed. Exits with its last words when it fails."""
        used = cpu_of_ended_s()
        began = time.perf_counter()
        job = self.start(*arguments)
        # A wait with a limit would look at intervals of 50 ms.
        limit = threading.Timer(TIMEOUT_S, job.kill_all)
        limit.start()
        try:
            code = job.process.wait()
            took = {"wall_s": time.perf_counter() - began, "cpu_s": cpu_of_ended_s() - used}
        finally:
            limit.cancel()
        if code:
            raise SystemExit(f"{' '.join(arguments[:3])} ended with {code}:{job.tail()}")
        return took, job.stdout


def cpu_of_ended_s() -> float:
    """Processor seconds of all commands that have ended, and of what they had started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# the commands


def measure(options: argparse.Namespace, commands: Commands, directory: Path) -> dict[str, Any]:
    from tests.e2e.jobs import scalerl

    commands.run(sys.executable, str(EXAMPLE / "make_model.py"), "--out", str(directory / "model"))
    init, _ = commands.run(*scalerl("init", "mine", "--model", "model", "--device", "cpu"))
    train = scalerl("train", "--config-dir", "mine", "--config-name", "train")
    train.append(f"trainer.total_training_steps={options.steps}")
    training, printed = commands.run(*train)
    ended_at = time.time()
    checkpoint = directory / "mine" / "run" / f"global_step_{options.steps}"
    committed_at = (checkpoint.parent / "latest_checkpointed_iteration.txt").stat().st_mtime
    phases = {name: float(took) for name, took in re.findall(r"^start: (.+) ([\d.]+) s$", printed, re.MULTILINE)}

    serving = environment_of_a_server(directory / "model")
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.warmup + options.repeats):
        took = {"python": commands.run(sys.executable, "-c", "pass")[0]}
        for name, code in IMPORTS.items():
            settings = ["env", *serving] if name == "serve" else []
            took[f"imports of {name}"], _ = commands.run(*settings, sys.executable, "-c", code)
        took["doctor"], _ = commands.run(*scalerl("doctor"))
        took["finished"], said = commands.run(*train)
        assert said.startswith(f"This run is finished: {checkpoint} is of step {options.steps}"), said
        took |= way_to_an_answer(commands, checkpoint / "actor", directory / f"merged-{number}")
        if number >= options.warmup:
            rounds.append(took)
    once = {
        "init": init["wall_s"],
        "train": training["wall_s"],
        "from its last checkpoint to its end": ended_at - committed_at,
        "start": phases,
    }
    return summarize(rounds, once)


def environment_of_a_server(model: Path) -> list[str]:
    """NAME=VALUE of what a server's process is given beside the environment of its command."""
    from scalerl.config.schema import ServerConfig
    from scalerl.rollout.servers.engines import ENGINES, Launch

    config = ServerConfig(name="sglang", dtype="float32")
    _, settings = ENGINES["sglang"].command(Launch(str(model), config, "cpu", 64, port=1))
    return [f"{name}={value}" for name, value in settings.items()]


def way_to_an_answer(commands: Commands, checkpoint: Path, target: Path) -> dict[str, dict[str, float]]:
    """Merges a checkpoint, serves the model and asks it twice: seconds of each part, and until the first answer."""
    from scalerl.rollout.servers.process import free_port
    from tests.e2e.jobs import scalerl

    began = time.perf_counter()
    merge, _ = commands.run(
        *scalerl("merge", "--backend", "megatron", "--local_dir", str(checkpoint), "--target_dir", str(target))
    )
    port = free_port(HOST)
    starts = time.perf_counter()
    server = commands.start(
        *scalerl("serve", str(target), "--host", HOST, "--port", str(port), "--device", "cpu")
    )  # fmt: skip
    while "is served at" not in server.stdout:
        if server.process.poll() is not None or time.perf_counter() - starts > TIMEOUT_S:
            raise SystemExit(f"scalerl serve does not answer:{server.tail()}")
        time.sleep(POLL_S)
    serve = time.perf_counter() - starts
    first = answer_s(port, target.name)
    whole = time.perf_counter() - began
    second = answer_s(port, target.name)
    server.process.send_signal(signal.SIGINT)
    if server.process.wait(TIMEOUT_S):
        raise SystemExit(f"scalerl serve did not end as it should:{server.tail()}")
    parts = {"serve": serve, "first answer": first, "second answer": second, "answer": whole}
    return {"merge": merge, **{name: {"wall_s": seconds} for name, seconds in parts.items()}}


def answer_s(port: int, model: str) -> float:
    """Seconds of one chat request."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"temperature": 0, "max_tokens": ANSWER_TOKENS}
    began = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = response.read()
    seconds = time.perf_counter() - began
    connection.close()
    if response.status != 200 or not json.loads(answer)["usage"]["completion_tokens"]:
        raise SystemExit(f"no answer, but {response.status}: {answer.decode(errors='replace')}")
    return seconds


# summary


def summarize(rounds: list[dict[str, dict[str, float]]], once: dict[str, Any]) -> dict[str, Any]:
    """rounds: seconds of everything in each round.  once: seconds of what is done before them.

    of_aim: the slowest round over the aim.  share_of_imports: of the medians.
    """
    spreads = {
        name: {kind: record.spread([took[name][kind] for took in rounds]) for kind in kinds}
        for name, kinds in rounds[0].items()
    }
    return {
        "aims_s": AIMS_S,
        "measured": spreads,
        "of_aim": {name: spreads[name]["wall_s"]["max"] / aim for name, aim in AIMS_S.items()},
        "share_of_imports": {
            name: spreads[f"imports of {name}"]["wall_s"]["median"] / spreads[name]["wall_s"]["median"]
            for name in IMPORTS
        },
        "once_s": once,
    }


def report(result: dict[str, Any]) -> str:
    rows = [("", "seconds", "min to max")]
    for name, took in result["measured"].items():
        wall = took["wall_s"]
        note = f"{wall['min']:.2f} to {wall['max']:.2f}"
        if "cpu_s" in took:
            note += f"; {took['cpu_s']['median']:.2f} s of processors"
        if name in result["share_of_imports"]:
            note += f"; imports {result['share_of_imports'][name]:.0%}"
        if name in result["of_aim"]:
            note += f"; aim {result['aims_s'][name]:.0f} s, slowest {result['of_aim'][name]:.2f} of it"
        rows.append((name, f"{wall['median']:.2f}", note))
    once = dict(result["once_s"])
    start = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in once.pop("start").items())
    rows += [(name, f"{seconds:.2f}", "once") for name, seconds in once.items()]
    return f"{record.table(rows)}\nstart of the run: {start}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
