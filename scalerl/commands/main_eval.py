"""The command `scalerl eval KEY=VALUE ...` (`python -m scalerl.commands.main_eval`), which scores responses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from scalerl.config import EvalConfig, asked_text, compose, jobs_of, run_jobs
from scalerl.config.schema import RewardModelConfig
from scalerl.errors import run_main

if TYPE_CHECKING:
    from scalerl.config.errors import ErrorCollector
    from scalerl.data.files import DataFile
    from scalerl.data.response_rows import ResponseColumns
    from scalerl.data.tables import FileTable
    from scalerl.rewards import RewardManager

# Number of progress lines.
NUM_REPORTS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 when every response has its score."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (text := asked_text("eval", arguments)) is not None:
        print(text)
        return 0
    if (jobs := jobs_of(arguments)) is not None:
        return run_jobs(jobs, main, _output_path, "data.output_path")
    dry_run = "--dry-run" in arguments
    cfg = compose("eval", [argument for argument in arguments if argument != "--dry-run"])

    # Imported here: --help and configuration errors must not wait for them.
    from scalerl.commands.evaluation import report, score_rows, write_scores
    from scalerl.data.response_rows import response_rows
    from scalerl.data.tables import joined

    manager, tables, columns = check_eval(cfg)
    try:
        # Reads all rows before the first call, so that a bad last row is not found after an hour.
        total = sum(len(row.responses) for row in response_rows(tables, columns))
        if dry_run:
            print(f"Everything checked: {total} responses; --dry-run scores none.")
            return 0
        scored = score_rows(manager, response_rows(tables, columns), _progress(total))
    finally:
        manager.close()
    if cfg.data.output_path is not None:
        write_scores(joined(tables), scored, cfg.data.output_path)
        print(f"scores in {cfg.data.output_path}")
    print(f"\n{report(scored)}\n")
    if failed := scored.failed:
        print(
            f"{len(failed)} of {total} responses could not be scored and count as wrong; the first: {failed[0].error}\n"
        )
    for key, value in scored.metrics().items():
        if key.startswith("val-core/"):
            print(f"{key} {value:.4f}")
    return 0


def _output_path(overrides: Sequence[str]) -> str | None:
    return compose("eval", overrides).data.output_path


def check_eval(cfg: EvalConfig) -> tuple[RewardManager, list[FileTable], ResponseColumns]:
    """Checks everything, and returns reward manager, rows and names of their columns.

    Raises ConfigError with every violation that was found.
    """
    from scalerl.base.user_code import import_files
    from scalerl.config.errors import ErrorCollector
    from scalerl.data.files import resolve_files
    from scalerl.data.response_rows import ResponseColumns
    from scalerl.rewards import build_reward_manager

    errors = ErrorCollector()
    errors.attempt(lambda: import_files(cfg.trainer.import_files))
    config = RewardModelConfig(**asdict(cfg.reward_model))
    manager = errors.attempt(lambda: build_reward_manager(config, cfg.custom_reward_function))
    files = errors.attempt(lambda: resolve_files(cfg.data.path, cfg.data.cache_dir))
    tables = None if files is None else errors.attempt(lambda: _tables(cfg, files, errors))
    errors.raise_if_any()
    assert manager is not None and tables is not None
    columns = ResponseColumns(
        cfg.data.response_key, cfg.data.data_source_key, cfg.data.reward_model_key, cfg.data.prompt_key
    )
    return manager, tables, columns


def _tables(cfg: EvalConfig, files: list[DataFile], errors: ErrorCollector) -> list[FileTable]:
    from scalerl.commands.evaluation import SCORE_COLUMNS
    from scalerl.data.tables import joined, output_problems, read_tables

    tables = read_tables(files)
    if cfg.data.output_path is not None:
        errors.violations.extend(output_problems("data.output_path", cfg.data.output_path, files))
        # Joined before a response is scored: what cannot be written is found here.
        taken = [name for name in SCORE_COLUMNS if name in joined(tables).column_names]
        if taken:
            errors.violations.append(
                f"data.path = {cfg.data.path}: has a column {', '.join(taken)} already, which data.output_path would "
                "need; give the file without it, or leave data.output_path out"
            )
    return tables


def _progress(total: int) -> Callable[[int], None]:
    marks = {max(1, total * tenth // NUM_REPORTS) for tenth in range(1, NUM_REPORTS + 1)}

    def show(done: int) -> None:
        if done in marks:
            print(f"scored {done} of {total} responses", flush=True)

    return show


if __name__ == "__main__":
    sys.exit(run_main(main))
