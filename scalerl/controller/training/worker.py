"""`MegatronWorker`: one trainer rank. The models of one pool live in the same processes and share process groups."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from scalerl.cluster.dispatch import Dispatch, MicroBatches, Result, register
from scalerl.cluster.pools import Reusable
from scalerl.metrics import GPUMemoryLogger, Metric, memory_phase
from scalerl.parallel import rendezvous
from scalerl.parallel.layout import Layout
from scalerl.protocol import DataProto, Jagged
from scalerl.user_code import forget_files, import_files

if TYPE_CHECKING:
    from scalerl.cluster.batch import Shard
    from scalerl.config.schema import (
        ActorConfig,
        AlgorithmConfig,
        CriticConfig,
        MegatronConfig,
        OptimConfig,
        RolloutCorrectionConfig,
    )
    from scalerl.families import Head
    from scalerl.hybrid.feeds import Replica
    from scalerl.hybrid.handover import RankMemory
    from scalerl.hybrid.transports import TransportName
    from scalerl.hybrid.weight_sync import WeightSync

P = ParamSpec("P")
R = TypeVar("R")
# Of the workers' own loggers: DEBUG shows memory before and after each phase, INFO the search for a loss scale.
LOGGING_LEVEL_ENV = "SCALERL_LOGGING_LEVEL"


def phase(
    name: str, *parts: str, role: str = "actor"
) -> Callable[[Callable[Concatenate[MegatronWorker, P], R]], Callable[Concatenate[MegatronWorker, P], R]]:
    """A worker's method that computes with that role's model: its parts are on the device while it runs.

    name: of the method in timing_s/* and perf/memory_*_gb/*. parts: of parallel.offload.PARTS; none given: all.
    """

    def decorate(method: Callable[Concatenate[MegatronWorker, P], R]) -> Callable[Concatenate[MegatronWorker, P], R]:
        @functools.wraps(method)
        def measured(self: MegatronWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with memory_phase(name), self.present(name, role, parts):
                return method(self, *args, **kwargs)

        return GPUMemoryLogger(role)(measured)

    return decorate


class MegatronWorker(Reusable):
    """Runs inside a Ray actor; `WorkerGroup.call` calls every method that carries @register."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        *,
        device: str,
        collective_timeout_s: float,
        seed: int,
        user_files: Sequence[str] = (),
    ) -> None:
        """user_files: register what the configuration names; imported in `join`."""
        self.rank, self.layout, self.device, self.seed = rank, layout, device, seed
        self.user_files = user_files
        self.collective_timeout_s = collective_timeout_s
        self.engines: dict[str, Any] = {}
        # Phase -> seconds since `memory` in which parts of its model came to the device and left it.
        self.offload_s: dict[str, float] = {}
        # Of `connect_rollout`.
        self.weight_sync: WeightSync | None = None
        # On rank 0, until it has joined: where the ranks meet.
        self.listener: socket.socket | None = None

    def rendezvous(self) -> tuple[str, int]:
        """This node's address as other nodes see it, and a port of it that this process listens on from now."""
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
        from scalerl.parallel import platform
        from scalerl.parallel.layout import initialize

        platform.install(self.device)
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
        """Parts from the other ranks; models, groups and user files of the run are gone then."""
        from scalerl.parallel.layout import leave

        if self.weight_sync is not None:
            self.weight_sync.close()
        super().leave()
        leave()
        forget_files()

    @register(Dispatch.ONE_TO_ALL)
    def build_engine(
        self,
        role: str,
        model_path: str,
        megatron: MegatronConfig,
        optim: OptimConfig | None,
        *,
        head: Head = "lm",
        trust_remote_code: bool = False,
    ) -> None:
        """role: actor, ref, critic or reward_model. optim None: frozen."""
        from scalerl.parallel.engine import MegatronEngine

        self.engines[role] = MegatronEngine(
            model_path, megatron, self.groups, optim=optim, head=head, trust_remote_code=trust_remote_code
        )
        self.engines[role].leave_device()

    @contextlib.contextmanager
    def present(self, name: str, role: str, parts: Sequence[str]) -> Iterator[None]:
        """That role's parts are on the device inside the block."""
        engine, began = self.engines[role], time.perf_counter()
        with engine.on_device(*parts):
            came = left = time.perf_counter()
            try:
                yield
            finally:
                left = time.perf_counter()
        if engine.leaves:
            moved_s = came - began + time.perf_counter() - left
            self.offload_s[name] = self.offload_s.get(name, 0.0) + moved_s

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Entry of calls of the user's own functions: `module:function` of a file that this process imported."""
        return self._method(method)(*args, **kwargs)

    def _method(self, name: str) -> Callable[..., Any]:
        module, _, function = name.rpartition(":")
        return functools.partial(getattr(sys.modules[module], function), self) if module else getattr(self, name)

    def run_on_shard(
        self, method: str, shard: Shard, kwargs: dict, *fragments: DataProto
    ) -> tuple[dict[str, Metric], dict[str, np.ndarray], DataProto | None]:
        """Entry of every DP_COMPUTE_PROTO call: puts the shard together, then calls the method.

        fragments: of all parts of the shard, in order.
        Returns metrics, sample columns and token columns apart: the driver takes the first two, and of the last only
        the reference.
        """
        batch, given = DataProto(samples=shard.samples), iter(fragments)
        for count, order in shard.parts:
            held = [DataProto(tokens=next(given).tokens) for _ in range(count)]
            batch = batch.union(held[0] if order is None else DataProto.concat(held).select(order))
        metrics, columns = self._method(method)(batch, shard.micro_batches, **kwargs)
        if columns is None:
            return metrics, {}, None
        return metrics, columns.samples, DataProto(columns.tokens) if columns.tokens else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("old_log_prob", "params")
    def compute_log_prob(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        temperature: float,
        correction: RolloutCorrectionConfig,
        config: ActorConfig,
    ) -> Result:
        """Column old_logprobs, the policy's entropy, and how far it is from the sampler; with a correction
        rollout_is_weights, loss_mask and num_loss_tokens too. config: how the entropy is aggregated."""
        outputs = self._logprobs("actor", shard, micro_batches, temperature)
        if not outputs:
            return {}, None
        from scalerl.algorithms import aggregated

        found, mask = DataProto({"old_logprobs": outputs["logprobs"]}), shard.tokens["response_mask"]
        entropy_T = outputs["entropy"].values.cpu()
        how = (config.loss_agg_mode, config.loss_scale_factor)
        metrics = {"actor/entropy_loss": aggregated(entropy_T, mask.values, mask.cu_seqlens, *how)}
        if "rollout_logprobs" in shard.tokens:
            from scalerl.controller.training.logprob_mismatch import compare_log_probs

            both = shard.union(found)
            compared, corrected = compare_log_probs(both, correction, group=self.groups.dp, device=self.device)
            metrics, found = metrics | compared, found.union(corrected)
        # What tp and cp ranks have is the same once more.
        is_first = self.groups.at.tp_rank == self.groups.at.cp_rank == 0
        return metrics if is_first else {}, found

    @register(Dispatch.DP_COMPUTE_PROTO)
    def find_worst_tokens(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Sample columns of `logprob_mismatch.worst_tokens`, from rollout_logprobs and old_logprobs."""
        from scalerl.controller.training.logprob_mismatch import worst_tokens

        return {}, DataProto(samples=worst_tokens(shard))

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("ref", "params", role="ref")
    def compute_ref_log_prob(self, shard: DataProto, micro_batches: MicroBatches, *, temperature: float) -> Result:
        """Column ref_logprobs."""
        outputs = self._logprobs("ref", shard, micro_batches, temperature)
        return {}, DataProto({"ref_logprobs": outputs["logprobs"]}) if outputs else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("values", "params", role="critic")
    def compute_values(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Column values."""
        outputs = self.engines["critic"].values(shard, _flat(micro_batches))
        return {}, DataProto(outputs) if outputs else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("reward_model", "params", role="reward_model")
    def compute_scores(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """Sample column scores: the reward model's, after the last token."""
        outputs = self.engines["reward_model"].scores(shard, _flat(micro_batches))
        return {}, DataProto(samples={"scores": outputs["scores"].cpu().numpy()}) if outputs else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sum_reward_kl(self, shard: DataProto, micro_batches: MicroBatches, *, kind: str, old_logprobs: str) -> Result:
        """Sample column reward_kl: sum over the sampled tokens. old_logprobs: name of the policy's column."""
        from scalerl.controller.training.token_advantages import reward_kl, sums_of_rows

        sums = sums_of_rows(reward_kl(shard, kind, old_logprobs=old_logprobs))
        return {}, DataProto(samples={"reward_kl": sums})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_advantages(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        config: AlgorithmConfig,
        kl: tuple[float, str] | None,
    ) -> Result:
        """Columns advantages and returns, of an estimator of single tokens (`credit.token_advantages`)."""
        from scalerl.controller.training.token_advantages import token_advantages

        metrics, columns = token_advantages(shard, config, kl, group=self.groups.dp, device=self.device)
        is_first = not (self.groups.at.tp_rank or self.groups.at.cp_rank or self.groups.at.pp_rank)
        return metrics if is_first else {}, columns

    def _logprobs(
        self, role: str, shard: DataProto, micro_batches: MicroBatches, temperature: float
    ) -> dict[str, Jagged]:
        return self.engines[role].logprobs(shard, _flat(micro_batches), temperature=temperature)

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_actor")
    def update_actor(
        self,
        shard: DataProto,
        micro_batches: MicroBatches,
        *,
        config: ActorConfig,
        temperature: float,
        totals: list[dict[str, int]],
        bypass_mode: bool,
    ) -> Result:
        """ppo_epochs passes over the mini-batches, one optimizer update each; none for what was rejected entirely.

        totals[mini-batch]: num_loss_tokens and num_sequences of the whole mini-batch, over all dp ranks.
        bypass_mode: the sampler's log-probs are the old ones.
        """
        from scalerl.algorithms import PolicyObjective, policy_loss_needs
        from scalerl.algorithms.losses import SELECTED

        if "advantages" not in shard.tokens:
            shard = shard.union(DataProto({"advantages": _per_token(shard, "advantages")}))
        if bypass_mode:
            shard = shard.union(DataProto({"old_logprobs": shard.tokens["rollout_logprobs"]}))
        corrected = "loss_mask" in shard.tokens
        # The counts are those of all ranks, so that all of them leave the same ones out.
        kept = [at for at, total in enumerate(totals) if total["num_loss_tokens"] or not corrected]
        mini_batches, kept_totals = [micro_batches[at] for at in kept], [totals[at] for at in kept]
        if SELECTED in policy_loss_needs(config.policy_loss.loss_mode):
            from scalerl.controller.training.token_advantages import covariance_column

            selected = covariance_column(
                shard,
                mini_batches,
                config.policy_loss,
                kept_totals,
                mask="loss_mask" if corrected else "response_mask",
                group=self.groups.dp,
                device=self.device,
            )
            shard = shard.union(DataProto({SELECTED: selected}))
        updates = self._update(
            "actor",
            shard,
            mini_batches,
            config.ppo_epochs,
            kept_totals,
            functools.partial(PolicyObjective, corrected=corrected),
            config,
            temperature=temperature,
        )
        metrics = self._update_metrics(updates, "actor")
        if metrics and corrected:
            num_rejected = (len(totals) - len(kept)) * config.ppo_epochs
            metrics["actor/rejected_updates"] = Metric(float(num_rejected), "max")
        return metrics, None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_critic", role="critic")
    def update_critic(
        self, shard: DataProto, micro_batches: MicroBatches, *, config: CriticConfig, totals: list[dict[str, int]]
    ) -> Result:
        """As update_actor, on the columns values and returns."""
        from scalerl.algorithms import ValueObjective

        updates = self._update("critic", shard, micro_batches, config.ppo_epochs, totals, ValueObjective, config)
        return self._update_metrics(updates, "critic"), None

    def _update(
        self,
        role: str,
        shard: DataProto,
        micro_batches: MicroBatches,
        num_epochs: int,
        totals: list[dict[str, int]],
        objective: Callable,
        config: ActorConfig | CriticConfig,
        **kwargs: Any,
    ) -> list[dict[str, float]]:
        """One optimizer update per epoch and mini-batch."""
        import torch

        updates = []
        for _ in range(num_epochs):
            for mini_batch, total in zip(micro_batches, totals, strict=True):
                updates.append(self.engines[role].update(shard, mini_batch, objective(config, **total), **kwargs))
        # What torch keeps for reuse is not there for the rollout server, which takes the device next.
        torch.cuda.empty_cache()
        return updates

    @register(Dispatch.ONE_TO_ALL)
    def set_dataset(self, name: str, dataset: Any) -> None:
        """dataset[i] has input_ids and loss_mask; held for update_sft and evaluate_sft."""
        self.datasets = getattr(self, "datasets", {}) | {name: dataset}

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("update_actor")
    def update_sft(self, shard: DataProto, micro_batches: MicroBatches, *, totals: list[dict[str, int]]) -> Result:
        """One update per mini-batch on rows of the training set. samples["row"]: index into it."""
        from scalerl.algorithms import SFTObjective

        shard = shard.union(self._sft_rows("train", shard.samples["row"]))
        updates = [
            self.engines["actor"].update(shard, mini_batch, SFTObjective(total["num_loss_tokens"]), temperature=1.0)
            for mini_batch, total in zip(micro_batches, totals, strict=True)
        ]
        return self._update_metrics(updates, "train"), None

    @register(Dispatch.DP_COMPUTE_PROTO)
    @phase("testing", "params")
    def evaluate_sft(self, shard: DataProto, micro_batches: MicroBatches) -> Result:
        """val/loss: mean negative log-likelihood of the validation set's loss tokens."""
        shard = shard.union(self._sft_rows("val", shard.samples["row"]))
        outputs = self._logprobs("actor", shard, micro_batches, 1.0)
        if not outputs or self.groups.at.tp_rank:
            return {}, None
        mask = shard.tokens["response_mask"].values
        num_tokens = float(mask.sum())
        mean = float(-(outputs["logprobs"].values * mask).sum()) / max(num_tokens, 1.0)
        return {"val/loss": Metric(mean, "mean", num_tokens)}, None

    def _sft_rows(self, name: str, rows: np.ndarray) -> DataProto:
        import torch

        picked = [self.datasets[name][int(row)] for row in rows]
        return DataProto(
            {
                "input_ids": Jagged.from_list([row.input_ids for row in picked], torch.int64),
                "response_mask": Jagged.from_list([row.loss_mask for row in picked], torch.bool),
            }
        )

    def _update_metrics(self, updates: list[dict[str, float]], prefix: str) -> dict[str, Metric]:
        """From one rank of the last stage: means over the step's updates that changed the weights, how many those were
        and how many were skipped; ppo_kl and clipfrac of the first apart."""
        if not self.groups.is_last_stage or self.groups.at.tp_rank or self.groups.at.dp_rank:
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
    def connect_rollout(
        self,
        replicas: Sequence[Replica],
        model_config: Mapping[str, Any],
        *,
        bucket_bytes: int,
        max_model_len: int,
        timeout_s: float,
        dtype: str | None = None,
        transport: TransportName = "shared",
        directory: str | None = None,
        model_path: str | None = None,
    ) -> None:
        """dtype: what the servers store; None: as the engine's."""
        import torch

        from scalerl.hybrid.weight_sync import WeightSync

        self.weight_sync = WeightSync(
            self.engines["actor"],
            replicas,
            model_config,
            bucket_bytes=bucket_bytes,
            max_model_len=max_model_len,
            timeout_s=timeout_s,
            dtype=getattr(torch, dtype) if dtype else None,
            transport=transport,
            directory=directory,
            model_path=model_path,
        )

    @register(Dispatch.ONE_TO_ALL)
    def reconnect_rollout(self, successors: Mapping[int, Replica]) -> None:
        """Index -> the restarted server."""
        assert self.weight_sync is not None, "no servers are connected"
        self.weight_sync.reconnect(successors)

    @register(Dispatch.ONE_TO_ALL)
    @phase("update_weights", "params")
    def sync_weights(
        self, policy_version: int, *, verify: bool, only: Sequence[int] | None = None, raise_errors: bool = True
    ) -> dict[str, Any]:
        assert self.weight_sync is not None, "no servers are connected"
        return self.weight_sync.sync(policy_version, verify=verify, only=only, raise_errors=raise_errors)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, role: str, directory: str) -> None:
        """Writes that role's distributed checkpoint into an existing directory."""
        from scalerl.checkpoint.megatron import save_engine

        with memory_phase("save_checkpoint"), self.engines[role].on_device("params", "optimizer"):
            save_engine(self.engines[role], directory)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, role: str, directory: str) -> None:
        from scalerl.checkpoint.megatron import load_engine

        with memory_phase("load_checkpoint"), self.engines[role].on_device("params", "optimizer"):
            load_engine(self.engines[role], directory)

    @register(Dispatch.RANK_ZERO)
    def peak_flops(self, dtype: str) -> float | None:
        """Of one device: from the table on a GPU, measured on a CPU; None for a GPU that the table does not know."""
        import torch

        from scalerl.metrics import device_peak_flops, measured_matmul_peak

        if self.device == "cuda":
            return device_peak_flops(torch.cuda.get_device_name(), dtype)
        return measured_matmul_peak("cpu", dtype)

    @register(Dispatch.ONE_TO_ALL)
    def gpu_ids(self) -> str:
        """What the node calls this rank's device."""
        import ray

        (gpu_id,) = ray.get_gpu_ids()
        return str(gpu_id)

    @register(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, Metric]:
        """`memory_metrics`, and timing_s/{phase}/offload of phases whose model comes and goes; since the last call."""
        from scalerl.metrics import memory_metrics

        moved, self.offload_s = self.offload_s, {}
        return memory_metrics() | {f"timing_s/{name}/offload": Metric(s, "max") for name, s in moved.items()}

    @register(Dispatch.ONE_TO_ALL)
    def device_memory(self) -> RankMemory:
        from scalerl.hybrid.handover import measure

        return measure(self.rank, self.device, self.engines)


def _flat(micro_batches: MicroBatches) -> list[Sequence[int]]:
    """All micro-batches, whatever their mini-batch."""
    return [rows for mini_batch in micro_batches for rows in mini_batch]


def _per_token(shard: DataProto, name: str) -> Jagged:
    """A per-sample value on every token of its sample."""
    import torch

    ids = shard.tokens["input_ids"]
    values = torch.as_tensor(shard.samples[name].astype(np.float32))
    return Jagged(values.repeat_interleave(ids.lengths), ids.cu_seqlens)
