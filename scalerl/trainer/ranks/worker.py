"""`MegatronWorker`: what every trainer rank does, whatever it trains: join, build models, save, load, measure.

The models of one pool live in the same processes and share process groups. The other methods that a run calls are in
`rl_worker.py` and `sft_worker.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scalerl.base import rendezvous
from scalerl.base.affinity import run_near_gpu
from scalerl.base.user_code import forget_files, import_files
from scalerl.cluster.dispatch import Dispatch, MicroBatches, Worker, register
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import GPUMemoryLogger, Metric, memory_phase
from scalerl.tracking.timeline import Span, Spans

if TYPE_CHECKING:
    from scalerl.checkpoint.pieces import WrittenFile
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.models import Head
    from scalerl.models.adapters import Adapter
    from scalerl.parallel.checkpoint import BackgroundSave
    from scalerl.trainer.ranks.profile import StepProfile

W = TypeVar("W", bound="MegatronWorker")
P = ParamSpec("P")
R = TypeVar("R")
# Level of the workers' own loggers: DEBUG shows memory before and after each phase, INFO the search for a loss scale.
LOGGING_LEVEL_ENV = "SCALERL_LOGGING_LEVEL"


def phase(
    name: str, *parts: str, role: str = "actor", reads: bool = False
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Decorates a worker's method that computes with a role's model: `parts` of it are on the device meanwhile.

    name: of the method in timing_s/* and perf/memory_*_gb/*. parts: of parallel.offload.PARTS; without any: all.
    reads: the method changes none of them.
    """

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def measured(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.in_phase(name, role, parts, reads=reads):
                return method(self, *args, **kwargs)

        return GPUMemoryLogger(role)(measured)

    return decorate


class MegatronWorker(Worker):
    """One trainer rank; its subclasses have the methods of a kind of training."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        *,
        device: str,
        collective_timeout_s: float,
        seed: int,
        user_files: Sequence[str] = (),
        flash_attention_impl: str | None = None,
    ) -> None:
        """Makes a rank that has not joined yet.

        user_files: register names of the configuration, in `join`.  flash_attention_impl: one that the configuration
        names; None: torch's own, until `take_up_flash_attention`.
        """
        super().__init__(rank, layout)
        self.flash_attention_impl = flash_attention_impl
        self.device, self.seed = device, seed
        self.user_files = user_files
        self.collective_timeout_s = collective_timeout_s
        self.engines: dict[str, Any] = {}
        # Phase -> seconds since `memory` that parts of its model took to get to the device and to leave it.
        self.offload_s: dict[str, float] = {}
        self.spans = Spans(f"rank {rank}")
        # While a step is recorded.
        self.profile: StepProfile | None = None
        # With trainer.async_save, from the first save on.
        self.background_save: BackgroundSave | None = None
        # On rank 0, until it has joined: where the ranks meet.
        self.listener: socket.socket | None = None

    def rendezvous(self) -> tuple[str, int]:
        """This node's address as other nodes see it, and a port there on which this process listens from now on."""
        import ray

        self.listener = rendezvous.listen(ray.util.get_node_ip_address())
        return self.listener.getsockname()[:2]

    def join(self, address: tuple[str, int]) -> None:
        """Joins torch.distributed at rank 0's address."""
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logging.getLogger("scalerl").setLevel(os.environ.get(LOGGING_LEVEL_ENV, "WARNING").upper())
        # Ranks of an outer launcher would be taken for ours.
        for name in [
            name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_"))
        ]:
            del os.environ[name]
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.layout.world_size), LOCAL_RANK="0")
        import torch

        if self.device == "cpu":
            torch.set_num_threads(1)
        else:
            run_near_gpu()
        from scalerl.parallel import platform
        from scalerl.parallel.flash_attention import use_flash_attention
        from scalerl.parallel.layout import initialize

        platform.install(self.device)
        use_flash_attention(self.flash_attention_impl)
        # After the platform: a file may import megatron.
        import_files(self.user_files)
        store = rendezvous.store(
            address,
            world_size=self.layout.world_size,
            timeout_s=self.collective_timeout_s,
            listener=self.listener,
        )
        self.groups = initialize(
            self.layout,
            backend=platform.backend(),
            timeout_s=self.collective_timeout_s,
            seed=self.seed,
            rank=self.rank,
            store=store,
        )

    def leave(self) -> None:
        """Leaves the other ranks; models, groups and user files of the run are gone then."""
        from scalerl.parallel.layout import leave

        if self.background_save is not None:
            self.background_save.close()
        if self.profile is not None:
            # Of a step that failed. The process may be of another run next.
            self.profile.end()
        super().leave()
        leave()
        forget_files()

    @register(Dispatch.ONE_TO_ALL)
    def take_up_flash_attention(self, impl: str | None) -> str | None:
        """Makes attention call that implementation (None: torch's own); returns why this rank cannot have it."""
        from scalerl.parallel.flash_attention import take_up, use_flash_attention, visible_capabilities

        if impl is None:
            use_flash_attention(None)
            return None
        refusal = take_up(impl, visible_capabilities())
        return None if refusal is None else f"rank {self.rank} on {socket.gethostname()}: {refusal.reason}"

    @register(Dispatch.RANK_ZERO)
    def current_flash_attention(self) -> str | None:
        """The implementation that attention calls; None: torch's own."""
        from torch.nn.attention import current_flash_attention_impl

        return current_flash_attention_impl()

    @register(Dispatch.ONE_TO_ALL)
    def build_engine(
        self,
        role: str,
        model_path: str,
        megatron: MegatronConfig,
        optim: OptimConfig | None,
        *,
        head: Head = "lm",
        adapter: Adapter | None = None,
        adapter_path: str | None = None,
        freeze_vision_tower: bool = False,
        leave_out_tower: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Builds the model of a role.  role: actor, ref, critic or reward_model. optim None: frozen.

        adapter, adapter_path, freeze_vision_tower, leave_out_tower: as of `MegatronEngine`.
        """
        import torch

        from scalerl.parallel.engine import MegatronEngine

        self.engines[role] = MegatronEngine(
            model_path,
            megatron,
            self.groups,
            optim=optim,
            head=head,
            adapter=adapter,
            adapter_path=adapter_path,
            freeze_vision_tower=freeze_vision_tower,
            leave_out_tower=leave_out_tower,
            trust_remote_code=trust_remote_code,
        )
        self.engines[role].leave_device()
        # A server that starts next sizes its KV cache by the free memory of the device.
        torch.cuda.empty_cache()

    @register(Dispatch.ONE_TO_ALL)
    def refer_to_actor(self) -> None:
        """Makes the actor's model without its adapter the reference."""
        self.engines["ref"] = self.engines["actor"]

    @contextlib.contextmanager
    def in_phase(self, name: str, role: str, parts: Sequence[str], *, reads: bool) -> Iterator[None]:
        """Keeps parts of a role's model on the device inside the block, whose time and memory count for a phase."""
        with memory_phase(name), self.recorded(f"{role} {name}"), self.present(name, role, parts, reads):
            yield

    @contextlib.contextmanager
    def present(self, name: str, role: str, parts: Sequence[str], reads: bool) -> Iterator[None]:
        """Keeps parts of a role's model on the device inside the block.  name: phase that the moves count for.

        reads: the block changes none of them.
        """
        engine, began = self.engines[role], time.perf_counter()
        with engine.on_device(*parts, reads=reads):
            arrived = leaving = time.perf_counter()
            try:
                yield
            finally:
                leaving = time.perf_counter()
        if engine.leaves:
            moved_s = arrived - began + time.perf_counter() - leaving
            self.offload_s[name] = self.offload_s.get(name, 0.0) + moved_s

    @contextlib.contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """Marks the block on the run's timeline, and in a profile of the step, if there is one."""
        with self.spans(name), contextlib.nullcontext() if self.profile is None else self.profile.phase(name):
            yield

    @register(Dispatch.ONE_TO_ALL)
    def recorded_spans(self) -> list[Span]:
        """What this rank did since the last call."""
        return self.spans.pop()

    @register(Dispatch.ONE_TO_ALL)
    def start_profile(self, tool: str, ranks: Sequence[int] | None) -> None:
        """Begins to record this rank, if it is one of `ranks` (None: all).  tool: as `StepProfile`."""
        if ranks is None or self.rank in ranks:
            from scalerl.trainer.ranks.profile import StepProfile

            self.profile = StepProfile(tool, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def stop_profile(self, directory: str) -> None:
        """Writes the recording since `start_profile` into an existing directory, by the role and the rank."""
        if self.profile is not None:
            role = "actor" if "actor" in self.engines else min(self.engines)
            self.profile.stop(Path(directory), f"{role}_rank_{self.rank}")
            self.profile = None

    def update_metrics(self, updates: list[dict[str, float]], prefix: str) -> dict[str, Metric]:
        """Metrics of a step's updates, from one rank of the last stage.

        They are means over the updates that changed the weights, how many those were and how many were skipped;
        ppo_kl and clipfrac of the first apart.
        """
        if not self.groups.is_last_stage or self.groups.coordinates.tp_rank or self.groups.coordinates.dp_rank:
            return {}
        metrics: dict[str, Metric] = {}
        applied = [update for update in updates if not update["skipped_updates"]]
        for key in applied[0].keys() - {"skipped_updates", "loss_scale"} if applied else ():
            name = key if "/" in key else f"{prefix}/{key}"
            metrics[name] = Metric(float(np.mean([update[key] for update in applied])), "mean")
        for key in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
            if applied and key in applied[0]:
                metrics[f"{key}_first_update"] = Metric(applied[0][key], "mean")
        if updates and "loss_scale" in updates[-1]:
            metrics[f"{prefix}/loss_scale"] = Metric(updates[-1]["loss_scale"], "max")
        metrics[f"{prefix}/skipped_updates"] = Metric(float(len(updates) - len(applied)), "max")
        metrics[f"{prefix}/num_updates"] = Metric(float(len(applied)), "max")
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, role: str, directory: str) -> None:
        """Writes that role's distributed checkpoint into an existing directory."""
        from scalerl.parallel.checkpoint import save_engine

        with (
            memory_phase("save_checkpoint"),
            self.recorded(f"{role} save_checkpoint"),
            self.engines[role].on_device("params", "optimizer", reads=True),
        ):
            save_engine(self.engines[role], directory)

    @register(Dispatch.ONE_TO_ALL)
    def begin_save_checkpoint(self, role: str, directory: str) -> None:
        """Begins a save as `save_checkpoint`: threads copy what this rank saves, before it changes, and write it."""
        from scalerl.parallel.checkpoint import BackgroundSave

        if self.background_save is None:
            self.background_save = BackgroundSave()
        with (
            memory_phase("save_checkpoint"),
            self.recorded(f"{role} save_checkpoint"),
            self.engines[role].on_device("params", "optimizer", reads=True),
        ):
            self.background_save.begin(role, self.engines[role], directory)

    @register(Dispatch.RANK_ZERO)
    def written_checkpoint(self, role: str) -> tuple[WrittenFile, dict[str, Any]] | None:
        """The state of this rank's part of the save that was begun last, as `BackgroundSave.written`."""
        assert self.background_save is not None, "no save was begun"
        return self.background_save.written(role)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, role: str, directory: str) -> None:
        from scalerl.parallel.restore import load_engine

        with memory_phase("load_checkpoint"), self.engines[role].on_device("params", "optimizer"):
            load_engine(self.engines[role], directory)

    @register(Dispatch.RANK_ZERO)
    def peak_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of one device: from the table on a GPU (None if it is not there), measured on a CPU."""
        import torch

        from scalerl.models.flops import device_peak_flops, measured_matmul_peak

        if self.device == "cuda":
            return device_peak_flops(torch.cuda.get_device_name(), dtype)
        return measured_matmul_peak("cpu", dtype)

    @register(Dispatch.ONE_TO_ALL)
    def gpu_ids(self) -> str:
        """Ray's id of this rank's device on its node."""
        import ray

        (gpu_id,) = ray.get_gpu_ids()
        return str(gpu_id)

    @register(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, Metric]:
        """The metrics `memory_metrics`, and timing_s/{phase}/offload of phases whose model comes and goes.

        They cover the time since the last call, by itself or within another call (`RLWorker.sync_weights`,
        `SFTWorker.update_sft`).
        """
        from scalerl.tracking.metrics import memory_metrics

        moved, self.offload_s = self.offload_s, {}
        return memory_metrics() | {f"timing_s/{name}/offload": Metric(s, "max") for name, s in moved.items()}


def flat(micro_batches: MicroBatches) -> list[Sequence[int]]:
    """The micro-batches of all mini-batches, in order."""
    return [rows for mini_batch in micro_batches for rows in mini_batch]
