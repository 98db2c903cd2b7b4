"""The command `scalerl generate KEY=VALUE ...`, which writes responses to prompts.

`python -m scalerl.commands.main_generation KEY=VALUE ...` is the same.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.base.stop import EXIT_REQUEUE, StopRequest
from scalerl.config import GenerationConfig, asked_text, compose, jobs_of, run_jobs
from scalerl.errors import run_main

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from scalerl.cluster.processes import Processes
    from scalerl.commands.generation import Prompt
    from scalerl.commands.parts import Fingerprint
    from scalerl.data.pictures import PictureProcessor


def main(argv: Sequence[str] | None = None, processes: Processes | None = None) -> int:
    """Runs the command; returns 0 when the output is written, 75 when the run was stopped and can be continued.

    processes: processes that the run uses and leaves running at its end; None: the run starts its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (text := asked_text("generation", arguments)) is not None:
        print(text)
        return 0
    if (jobs := jobs_of(arguments)) is not None:
        return run_jobs(jobs, lambda job: main(job, processes), _output_path, "data.output_path")
    dry_run = "--dry-run" in arguments
    cfg = compose("generation", [argument for argument in arguments if argument != "--dry-run"])
    stop = StopRequest()

    # Imported here: --help and configuration errors must not wait for them.
    from scalerl.commands.generation import generate, generation_servers
    from scalerl.commands.parts import Parts, is_complete, remove_parts

    inputs = check_generation(cfg)
    output = Path(cfg.data.output_path).expanduser()
    if is_complete(output, inputs.fingerprint):
        if not dry_run:
            remove_parts(output)
        print(f"{output} is there already, made with these settings.")
        return 0
    if dry_run:
        print("Everything checked; --dry-run starts nothing.")
        return 0
    with (
        stop.listening("The same command continues from what was saved."),
        Parts(output, inputs.fingerprint, len(inputs.prompts), cfg.data.batch_size) as parts,
    ):
        if todo := parts.missing():
            print(
                f"{len(inputs.prompts)} prompts x {cfg.data.n_samples} responses in {parts.num_batches} batches, "
                f"{parts.num_batches - len(todo)} of them done before",
                flush=True,
            )
            logs = parts.directory.absolute() / "logs"
            with generation_servers(cfg, inputs.device, logs, processes) as servers:
                done = asyncio.run(
                    generate(
                        cfg,
                        inputs.prompts,
                        parts,
                        servers,
                        inputs.tokenizer,
                        stop=lambda: stop.requested,
                        processor=inputs.processor,
                    )
                )
            if not done:
                print(f"stopped; the same command continues from {parts.directory}")
                return EXIT_REQUEUE
            if servers.num_resubmitted:
                print(f"{servers.num_resubmitted} responses were asked again, their servers were lost")
        parts.finish(inputs.table)
    print(f"responses in {output}")
    return 0


def _output_path(overrides: Sequence[str]) -> str:
    return compose("generation", overrides).data.output_path


@dataclass(frozen=True)
class GenerationInputs:
    """The checked inputs of a generation.  table: the rows of all files.  device: cuda or cpu."""

    table: pa.Table
    prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    processor: PictureProcessor | None
    fingerprint: Fingerprint
    device: str


def check_generation(cfg: GenerationConfig) -> GenerationInputs:
    """Checks everything, and returns the inputs.  Raises ConfigError with every violation that was found."""
    from scalerl.cluster.device import resolve_device
    from scalerl.cluster.ray_session import one_machine_violations
    from scalerl.commands.generation import check_new_columns, read_prompts
    from scalerl.commands.parts import fingerprint
    from scalerl.config.errors import ErrorCollector
    from scalerl.data import load_tokenizer
    from scalerl.data.chat import require_chat_template, use_chat_template
    from scalerl.data.files import resolve_files
    from scalerl.data.model_source import fetch_models
    from scalerl.data.pictures import load_processor
    from scalerl.data.tables import joined, output_problems, read_tables
    from scalerl.models import eos_token_ids
    from scalerl.rollout.servers.engines import ENGINES
    from scalerl.rollout.servers.engines.base import check_context_length
    from scalerl.trainer.checks.models import ends_of_answers_violations

    errors = ErrorCollector()
    device = errors.attempt(partial(resolve_device, cfg.trainer.device)) or "cpu"
    errors.violations.extend(one_machine_violations(cfg))
    fetch_models(cfg, errors.attempt)
    max_model_len = cfg.rollout.prompt_length + cfg.rollout.response_length
    errors.attempt(
        partial(check_context_length, cfg.model.path, max_model_len, "rollout.prompt_length + rollout.response_length")
    )
    tp_size = cfg.rollout.tensor_model_parallel_size
    errors.violations.extend(
        ENGINES[cfg.rollout.name].served_model_violations(cfg.model.path, "rollout.tensor_model_parallel_size", tp_size)
    )
    tokenizer = errors.attempt(lambda: load_tokenizer(cfg.model.path, cfg.model.trust_remote_code))
    if tokenizer is not None:
        errors.attempt(lambda: use_chat_template(tokenizer, cfg.data.chat_template_path))
        errors.attempt(lambda: require_chat_template(tokenizer))
        eos_ids = errors.attempt(lambda: eos_token_ids(cfg.model.path)) or ()
        setting, kwargs = f"model.path = {cfg.model.path}", cfg.data.chat_template_kwargs
        errors.violations.extend(ends_of_answers_violations(setting, tokenizer, eos_ids, kwargs))
    served = ENGINES[cfg.rollout.name].takes_pictures
    num_known = len(errors.violations)
    processor = errors.attempt(lambda: load_processor(cfg.model.path, cfg.data, served=served))
    is_loaded = len(errors.violations) == num_known
    if processor is not None and not served:
        errors.violations.append(
            f"rollout.name = {cfg.rollout.name}: computes no vision tower, which {cfg.model.path} has; set "
            "rollout.name=sglang"
        )
    files = errors.attempt(lambda: resolve_files(cfg.data.path, cfg.data.cache_dir))
    tables = table = prompts = None
    if files is not None:
        errors.violations.extend(output_problems("data.output_path", cfg.data.output_path, files))
        tables = errors.attempt(lambda: read_tables(files, cfg.data.max_samples))
    if tables is not None:
        errors.attempt(lambda: check_new_columns(tables, cfg))
        table = errors.attempt(lambda: joined(tables))
        # Without a processor that does not load rows with images would be refused for another reason.
        if tokenizer is not None and tokenizer.chat_template and is_loaded:
            prompts = errors.attempt(lambda: read_prompts(tables, cfg, tokenizer, processor))
    errors.raise_if_any()
    assert table is not None and prompts is not None and tokenizer is not None and files is not None
    return GenerationInputs(table, prompts, tokenizer, processor, fingerprint(cfg, files), device)


if __name__ == "__main__":
    sys.exit(run_main(main))
