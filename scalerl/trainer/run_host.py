"""`RunHost`: what a run has from its first start to its end, however often its ranks start in between."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from scalerl.base.directory_lock import DirectoryInUseError, EarlierAttemptError, directory_lock
from scalerl.base.stop import StopRequest
from scalerl.checkpoint.errors import DamagedCheckpointError
from scalerl.checkpoint.store import finish_commit
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.processes import Lease, Processes
from scalerl.config import PPOConfig, SFTConfig
from scalerl.config.schema import RunConfig
from scalerl.errors import UserError
from scalerl.trainer.checks.preflight import PPOInputs, SFTInputs, find_resume_point_again
from scalerl.trainer.console_texts import StartPhases
from scalerl.trainer.rank_restarts import RankRestarts, seconds_left
from scalerl.trainer.saving.checkpoints import Resumed, find_resume_point

# Directory in trainer.default_local_dir for the files of a run with trainer.val_only.
VAL_ONLY = "val_only"
# Directory in trainer.default_local_dir for the logs of servers, and for Ray's logs when a run fails.
LOGS = "logs"
# Set by a launcher: the directory for the logs of this attempt.
ATTEMPT_DIR_ENV = "SCALERL_ATTEMPT_DIR"
# File in the launcher's directory of this attempt (ray.sbatch reads it): the directory of the run.
RUN_DIR_NOTE = ".run_dir"

Inputs = TypeVar("Inputs", PPOInputs, SFTInputs)
T = TypeVar("T")


class RunHost:
    """Signals, directory and Ray cluster of a run; `run_host` makes one.

    stop: the request to stop that signals make.  run_dir: locked against other runs.  phases: of the start.
    """

    def __init__(
        self,
        cfg: PPOConfig | SFTConfig,
        stop: StopRequest,
        run_dir: Path,
        phases: StartPhases,
        restarts: RankRestarts,
        processes: Processes | None,
        stack: ExitStack,
    ) -> None:
        """Holds no processes of a run yet.

        processes: None: the first lease starts its own.  stack: ends them, and then what is below them.
        """
        self._cfg = cfg
        self.stop, self.run_dir, self.phases, self.restarts = stop, run_dir, phases, restarts
        self._processes, self._stack = processes, stack

    def lease(self, *, num_workers: int, device: str) -> Lease:
        """The pools and processes of one start.  num_workers, device: as `Processes.start`."""
        if self._processes is None:
            log_dir = log_directory(self.run_dir)
            own = Processes.start(num_workers=num_workers, device=device, log_dir=log_dir)
            self._processes = self._stack.enter_context(own)
        return Lease(self._processes, survives=self.restarts.survives)

    def train(self, inputs: Inputs, start: Callable[[Inputs], T]) -> T:
        """Returns start(inputs); where a rank is lost, `start` is called again as often as trainer.max_rank_restarts.

        It gets inputs that resume from the newest checkpoint of the run. Where the ranks find that a checkpoint's
        tensors are damaged, it gets inputs that resume from the one before it, with trainer.resume_mode=auto. Raises
        what `start` raised last.
        """
        damaged: dict[Path, str] = {}
        while True:
            self.restarts.begin()
            inputs = replace(inputs, resumed=self.restarts.resumed)
            try:
                return start(inputs)
            except WorkerError as error:
                if not self.restarts.pop_decision(error):
                    raise self.restarts.explained(error) from None
            except DamagedCheckpointError as error:
                self._pass_over(inputs, damaged, error)

    def _pass_over(
        self, inputs: PPOInputs | SFTInputs, damaged: dict[Path, str], error: DamagedCheckpointError
    ) -> None:
        """Adds the checkpoint that the run could not resume from to `damaged`, and finds the one before it.

        Raises UserError if that is not to be, or if one that was fetched anew is damaged again.
        """
        directory = inputs.resumed.directory
        assert directory is not None
        if self._cfg.trainer.resume_mode != "auto" or directory in damaged:
            raise UserError(
                f"checkpoint {directory} cannot be loaded: {error}; choose another with trainer.resume_from_path"
            ) from None
        damaged[directory] = str(error)
        self.restarts.resumed = _resume_point_again(self._cfg, inputs, damaged)


@contextmanager
def run_host(
    cfg: PPOConfig | SFTConfig,
    inputs: PPOInputs | SFTInputs,
    processes: Processes | None = None,
    phases: StartPhases | None = None,
) -> Iterator[RunHost]:
    """Takes the run's directory and listens to signals for the block.

    processes: processes that the run uses and leaves running at its end; None: the run starts its own, which end with
    the block.
    """
    stop = StopRequest(cfg.trainer.save_deadline_s, seconds_left)
    with ExitStack() as stack:
        # Before anything starts, so that a notice that comes early is not lost, and until everything has ended.
        stack.enter_context(stop.listening())
        run_dir = _lock_directory(stack, cfg)
        restarts = RankRestarts(cfg.trainer, stop, _resumed_under_lock(cfg, inputs))
        yield RunHost(cfg, stop, run_dir, phases or StartPhases(), restarts, processes, stack)


def _resumed_under_lock(cfg: PPOConfig | SFTConfig, inputs: PPOInputs | SFTInputs) -> Resumed:
    """The checkpoint that the run resumes from, now that no other run writes to its directory.

    The one that `inputs` were checked with is another if the run before was still saving then, and where
    trainer.checkpoint_mirror has a newer one: that is fetched here, as it changes the directory.
    """
    trainer = cfg.trainer
    if not is_val_only(cfg):
        finish_commit(trainer.default_local_dir)
    if trainer.resume_mode != "auto":
        return inputs.resumed
    if trainer.checkpoint_mirror is not None:
        return _resume_point_again(cfg, inputs, {})
    with warnings.catch_warnings():
        # Those of the first look.
        warnings.simplefilter("ignore")
        try:
            is_same = find_resume_point(trainer.default_local_dir, "auto", None, digests=False) == inputs.resumed
        except ValueError:
            is_same = False
    return inputs.resumed if is_same else _resume_point_again(cfg, inputs, {})


def _resume_point_again(
    cfg: PPOConfig | SFTConfig, inputs: PPOInputs | SFTInputs, passed_over: Mapping[Path, str]
) -> Resumed:
    """Finds the checkpoint anew (`find_resume_point_again`); fetches none into a directory that another run writes to.

    That is asked with trainer.val_only alone, whose own directory is another one.
    Raises DirectoryInUseError, EarlierAttemptError where that leaves no checkpoint.
    """
    trainer = cfg.trainer
    if not is_val_only(cfg) or trainer.checkpoint_mirror is None:
        return find_resume_point_again(cfg, inputs, passed_over)
    root = Path(trainer.default_local_dir)
    with ExitStack() as stack:
        try:
            stack.enter_context(directory_lock(root, _setting(trainer), grace_s=0.0, earlier_attempt_grace_s=0.0))
        except (DirectoryInUseError, EarlierAttemptError) as error:
            resumed = find_resume_point_again(cfg, inputs, passed_over, fetches=False)
            if resumed.directory is None:
                raise
            warnings.warn(f"trainer.checkpoint_mirror is not asked for a newer checkpoint: {error}", stacklevel=2)
            return resumed
        return find_resume_point_again(cfg, inputs, passed_over)


def log_directory(run_dir: Path) -> Path:
    """The directory for logs of servers and Ray, and for reports: the launcher's for this attempt, else the run's."""
    return Path(os.environ.get(ATTEMPT_DIR_ENV) or run_dir / LOGS)


def is_val_only(cfg: PPOConfig | SFTConfig) -> bool:
    return isinstance(cfg, PPOConfig) and cfg.trainer.val_only


def _setting(trainer: RunConfig) -> str:
    """The key that led to the directory, for errors of its lock."""
    return f"trainer.default_local_dir = {trainer.default_local_dir}"


def _lock_directory(stack: ExitStack, cfg: PPOConfig | SFTConfig) -> Path:
    """The run's directory, locked against other runs until the stack ends.

    trainer.default_local_dir, or its subdirectory val_only with trainer.val_only.
    """
    run_dir = Path(cfg.trainer.default_local_dir)
    if is_val_only(cfg):
        # The training run's own files stay as they are; that run may still be writing them.
        run_dir = run_dir / VAL_ONLY
    stack.enter_context(directory_lock(run_dir, _setting(cfg.trainer)))
    if attempt := os.environ.get(ATTEMPT_DIR_ENV):
        # So that the launcher finds the newest checkpoint.
        Path(attempt).mkdir(parents=True, exist_ok=True)
        (Path(attempt) / RUN_DIR_NOTE).write_text(f"{run_dir.absolute()}\n", encoding="utf-8")
    return run_dir
