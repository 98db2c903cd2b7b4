"""`memory_plan`: phase by phase, what each kind of device of a run holds, and whether that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scalerl.base.files import GIB
from scalerl.config import (
    LayoutSizes,
    PPOConfig,
    SFTConfig,
    model_roles,
    refers_to_actor,
    sends_adapter,
    trained_layout,
)
from scalerl.config.layout import longest_sample
from scalerl.config.schema import MegatronConfig, RolloutConfig
from scalerl.config.servers import transport_of
from scalerl.extras.plan.activations import head_bytes, kept_bytes, micro_batches_in_flight, tower_bytes
from scalerl.extras.plan.parameters import StageParameters, checkpoint_bytes, num_trained, stage_parameters
from scalerl.extras.plan.servers import CONTEXT_BYTES, GRAPH_BYTES, ServerBytes, server_bytes
from scalerl.models import ModelShape
from scalerl.models.routing import RoutingShape
from scalerl.models.sizes import FLOAT, ITEMSIZE, largest_tensor, model_bytes, num_parameters
from scalerl.parallel.layout import Layout
from scalerl.rollout.sync.handover import BUCKET_COPIES, bucket_bytes_that_fit, hashed_expert_bytes

# Assumed, of a trainer's process on a GPU: CUDA context, libraries, NCCL's buffers.
PROCESS_BYTES = int(1.5 * GIB)
_MIB = 1 << 20
# Of host memory that a rank takes in addition to write or read its share of a checkpoint: one piece of a
# tensor (checkpoint.pieces) on its way from or to a device, and buffers of files.
CHECKPOINT_PIECE_BYTES = 64 * _MIB

# Of a server with gated delta nets.
STATES = "delta net states"
ADAPTERS = "server adapters"
# What each part is made of; the report names them.
SOURCES = {
    "weights": "parameters of the rank x bytes of megatron.dtype",
    "gradients": "4 B x trained parameters of the rank (megatron's DDP buffer)",
    "optimizer": "12 B (float32: 8) x trained parameters of the rank / ranks that share it (use_distributed_optimizer)",
    "activations": "tensors kept by the layers x tokens per micro-batch x micro-batches in flight",
    "vision tower": "if each token of a prompt (SFT: each token) is of a picture: what its blocks keep, and one takes",
    "vocabulary": "float32 logits of a chunk twice, the chunk in the model's dtype, gradient of the hidden states",
    "layer": "what one layer takes while it is computed (again), and the gradient of its largest tensor",
    "gradient exchange": "on a CPU: 4 B x trained parameters of the rank, the copy that gloo's reduce-scatter sums",
    "optimizer step": "on a CPU: 4 B x parameters whose state is here (square root of the second moment)",
    "buckets": "copies of update_weights_bucket_megabytes, less where memory is short, at least of the largest tensor",
    "merged weight": "in float32, twice: the largest matrix with an adapter, to which a weight sync adds that",
    "checksums": "experts of a layer, kept until their fused tensors are whole (rollout.verify_weights_every)",
    "server weights": "parameters / rollout.tensor_model_parallel_size x bytes of rollout.dtype, or of quantization",
    "KV cache": "tokens of the cache x layers x key/value heads of the rank x head size x 2",
    STATES: "max_num_seqs x float32 states of gated delta nets, and the tokens that their convolutions still see",
    ADAPTERS: "room for two adapters: their part of split rows or columns, the rest on every device of a server",
    "save copy": "bytes of a checkpoint that the rank writes (trainer.async_save), in host memory",
    "server's rest": "assumed: CUDA context, graphs and prefill buffers of a server",
    "process": "assumed: CUDA context, libraries and NCCL",
}


@dataclass(frozen=True)
class Phase:
    """What is on a device at the peak of one phase of a step, by part: keys of SOURCES, with the role in front."""

    name: str
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class DevicePlan:
    """The phases of one kind of device.  name: its role and pipeline stage.  layers: those of the stage's model.

    save_copy_bytes: of host memory that trainer.async_save takes for a rank, from its first save on.
    """

    name: str
    layers: tuple[int, ...]
    phases: list[Phase]
    save_copy_bytes: int = 0

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)


@dataclass(frozen=True)
class RoutedBytes:
    """The host memory of the sampler's choices of experts (algorithm.routing_replay), in bytes.

    token: of each token.  step: of a step's samples of the greatest length, over all nodes; the rollout workers have
    them, and Ray's object store has as many.  server: of each rank of a server, for the tokens of its KV cache; None:
    their number is not known.
    """

    token: int
    step: int
    server: int | None

    @classmethod
    def of(cls, cfg: PPOConfig, shape: ModelShape, kv_tokens: int | None) -> RoutedBytes | None:
        """kv_tokens: of a replica's cache.  Returns None for a run whose trainer does not follow the sampler."""
        if cfg.algorithm.routing_replay is None or not shape.num_experts:
            return None
        routing = RoutingShape.of(shape)
        num_samples = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
        # SGLang has an int32 for each choice.
        row_bytes = 4 * len(routing.moe_layers) * routing.top_k
        return cls(
            routing.token_bytes,
            num_samples * longest_sample(cfg) * routing.token_bytes,
            None if kv_tokens is None else max(0, kv_tokens) * row_bytes,
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run takes on its devices.

    memory_bytes: of a device; None: not known, and nothing is too large.
    server: of one device of the policy's servers; None: no servers.  longest_sample: tokens of prompt and response.
    num_trained: parameters of the policy's adapter; None: all are trained.  backup_bytes: of host memory that a server
    takes for each of its devices, where its weights are while they are off it.
    routed: None without algorithm.routing_replay.
    """

    devices: list[DevicePlan]
    memory_bytes: int | None
    server: ServerBytes | None
    longest_sample: int
    max_num_seqs: int
    sync_bytes: int
    checkpoint_bytes: int
    num_parameters: int
    num_trained: int | None
    devices_per_node: int = 1
    routed: RoutedBytes | None = None
    backup_bytes: int = 0

    @property
    def concurrency(self) -> int | None:
        """Samples of the greatest length that a replica's KV cache holds at a time, at most max_num_seqs."""
        if self.server is None or self.server.kv_tokens is None:
            return None
        return max(0, min(self.max_num_seqs, self.server.kv_tokens // self.longest_sample))

    def problems(self) -> list[str]:
        """One sentence for each kind of device that has too little memory, and for servers that hold no sample."""
        if self.memory_bytes is None:
            return []
        # Of a pipeline the fullest stage stands for all.
        fullest: dict[str, DevicePlan] = {}
        for device in self.devices:
            pool = device.name.split(",")[0]
            if pool not in fullest or device.peak.num_bytes > fullest[pool].peak.num_bytes:
                fullest[pool] = device
        problems = [
            f"{device.name}: {device.peak.name} takes {_gib(device.peak.num_bytes)} GiB of {_gib(self.memory_bytes)} "
            f"({_largest(device.peak)})"
            for device in fullest.values()
            if device.peak.num_bytes > self.memory_bytes
        ]
        if self.server is not None and self.concurrency == 0:
            tokens = max(0, self.server.kv_tokens or 0)
            problems.append(
                f"rollout servers: {_gib(self.server.weights)} GiB of weights leave a KV cache of {tokens} tokens on a "
                f"device, and the longest sample has {self.longest_sample}"
            )
        return problems


def _largest(phase: Phase) -> str:
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in parts)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


@dataclass(frozen=True)
class _Model:
    """A model of the run on its devices. has_optimizer: it is trained.

    is_base: it is the actor's without its adapter, and has no weights of its own.  picture_share: of the tokens that
    can be of pictures.
    """

    role: str
    shape: ModelShape
    megatron: MegatronConfig
    layout: Layout
    stages: tuple[StageParameters, ...]
    max_tokens_per_micro_batch: int
    num_micro_batches: int
    has_optimizer: bool
    on_cpu: bool
    is_base: bool
    picture_share: float

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on each device that shares it."""
        return math.ceil(self.max_tokens_per_micro_batch / self.layout.cp_size)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.megatron.dtype]

    def state(self, stage: int) -> dict[str, int]:
        """The bytes of each part of this model on a device of the stage when all of it is there."""
        if self.is_base:
            return {}
        parameters = self.stages[stage]
        bytes_by_part = {"weights": parameters.weight_bytes(self.itemsize)}
        if self.has_optimizer:
            distributed = self.megatron.use_distributed_optimizer
            bytes_by_part["gradients"] = parameters.gradient_bytes
            bytes_by_part["optimizer"] = parameters.optimizer_bytes(self.itemsize, distributed=distributed)
        return bytes_by_part

    def resting(self, stage: int) -> dict[str, int]:
        """The bytes of each part of this model on a device of the stage while it does not compute."""
        away = {
            "weights": self.megatron.param_offload,
            "gradients": self.megatron.grad_offload,
            "optimizer": self.megatron.optimizer_offload,
        }
        return {part: 0 if away[part] else size for part, size in self.state(stage).items()}

    def forward(self, stage: int) -> dict[str, int]:
        """The bytes of each part of a pass without gradients, except the weights.

        A bound: all that one layer makes, of which it frees a part on its way, and the vocabulary's pass after it.
        """
        keeping = replace(self.megatron, recompute_granularity=None)
        whole, _ = kept_bytes(self.shape, self.layout, keeping, stage, on_cpu=self.on_cpu)
        bytes_by_part = {"layer": int(whole / len(self.stages[stage].layers) * self.tokens)}
        bytes_by_part |= self._tower(stage, 0)
        if stage == self.layout.pp_size - 1:
            bytes_by_part["vocabulary"] = int(sum(self._head()))
        return bytes_by_part

    def backward(self, stage: int) -> dict[str, int]:
        """The bytes of each part of an update except weights, gradients and optimizer: of its passes or the exchange.

        The gradients are exchanged when the last micro-batch has given back what it kept. NCCL needs nothing for that.
        """
        passes = self._passes(stage)
        copies = self.on_cpu and self.megatron.use_distributed_optimizer
        exchange = self.stages[stage].exchange_bytes if copies else 0
        return passes if sum(passes.values()) >= exchange else {"gradient exchange": exchange}

    def _passes(self, stage: int) -> dict[str, int]:
        kept, most = kept_bytes(self.shape, self.layout, self.megatron, stage, on_cpu=self.on_cpu)
        in_flight = micro_batches_in_flight(self.layout, stage, self.num_micro_batches)
        bytes_by_part = {"activations": int(kept * self.tokens * in_flight)} | self._tower(stage, in_flight)
        layer = int((most - kept) * self.tokens) + self.itemsize * self.stages[stage].largest
        joined = self.itemsize * self.stages[stage].joined
        if self.megatron.recompute_granularity == "full":
            layer += joined * self.megatron.recompute_num_layers // len(self.stages[stage].layers)
        else:
            bytes_by_part["activations"] += int(joined * in_flight)
        if stage == self.layout.pp_size - 1:
            head_kept, head_working = self._head()
            bytes_by_part["activations"] += int(head_kept)
            # The vocabulary's pass is over when the last layer's begins.
            if head_working >= layer:
                return bytes_by_part | {"vocabulary": int(head_working)}
        return bytes_by_part | {"layer": max(0, layer)}

    def _tower(self, stage: int, in_flight: float) -> dict[str, int]:
        """The bytes of the vision tower in a pass.  in_flight: micro-batches that keep them; 0: without gradients."""
        if self.shape.vision is None or stage > 0:
            return {}
        kept, block = tower_bytes(self.shape, self.shape.vision, self.megatron)
        return {"vision tower": int((kept * in_flight + block) * self.tokens * self.picture_share)}

    def step(self, stage: int) -> dict[str, int]:
        """The bytes of each temporary of the optimizer's step: on a GPU it is fused, and has none."""
        if not self.on_cpu:
            return {}
        numbers = self.stages[stage].optimizer_numbers(distributed=self.megatron.use_distributed_optimizer)
        return {"optimizer step": FLOAT * numbers}

    def save_copy(self, stage: int) -> int:
        """The bytes that a rank of the stage copies to host memory for a save in the background."""
        return self.stages[stage].saved_bytes(self.itemsize) if self.has_optimizer else 0

    def _head(self) -> tuple[float, float]:
        return head_bytes(self.shape, self.layout, self.megatron, self.tokens, on_cpu=self.on_cpu)


def memory_plan(
    cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], *, memory_bytes: int | None, on_cpu: bool = False
) -> MemoryPlan:
    """Plans the memory of a run, phase by phase, for each kind of device.

    shapes: role -> shape of its model (`actor`, and those of `model_roles`); of SFT `actor` alone.
    memory_bytes: of a device; None: not known.  on_cpu: with the tensors of the CPU's operations.
    Raises ValueError if a layout cannot hold its model.
    """
    if isinstance(cfg, SFTConfig):
        return _sft_plan(cfg, shapes["actor"], memory_bytes, on_cpu)
    models = {model.role: model for model in _models(cfg, shapes, on_cpu)}
    own_pools = {role.name for role in model_roles(cfg) if role.has_own_pool}
    together = [model for role, model in models.items() if role not in own_pools]
    actor, rollout = models["actor"], cfg.actor_rollout_ref.rollout
    hybrid = cfg.actor_rollout_ref.hybrid_engine
    # What servers find when they start: the trainer has built its models and left the device.
    resting = max(sum(_all_resting(together, stage).values()) for stage in range(actor.layout.pp_size)) if hybrid else 0
    process = 0 if on_cpu else PROCESS_BYTES
    free = None if memory_bytes is None else memory_bytes - (resting + process if hybrid else 0)
    alone = sends_adapter(cfg)
    server = server_bytes(shapes["actor"], rollout, free, on_cpu=on_cpu, with_adapter=alone)
    devices = [
        DevicePlan(
            f"trainer, stage {stage}" if actor.layout.pp_size > 1 else "trainer",
            actor.stages[stage].layers,
            list(_phases(cfg, together, stage, server if hybrid else None, process, memory_bytes)),
            _save_copy(cfg, together, stage),
        )
        for stage in range(actor.layout.pp_size)
    ]
    for name in sorted(own_pools):
        model = models[name]
        devices += [
            DevicePlan(
                f"{name}, stage {stage}" if model.layout.pp_size > 1 else name,
                model.stages[stage].layers,
                list(_own_phases(model, stage, process, _save_copy(cfg, [model], stage))),
                _save_copy(cfg, [model], stage),
            )
            for stage in range(model.layout.pp_size)
        ]
    if not hybrid:
        devices.append(DevicePlan("rollout server", (), [Phase("rollout", _serving(server, process))]))
    return MemoryPlan(
        devices,
        memory_bytes,
        server,
        longest_sample(cfg),
        rollout.max_num_seqs,
        sync_bytes=ITEMSIZE[rollout.dtype] * num_trained(shapes["actor"])
        if alone
        else model_bytes(shapes["actor"], actor.itemsize, in_fp8=rollout.quantization is not None),
        checkpoint_bytes=sum(checkpoint_bytes(m.shape, m.itemsize) for m in models.values() if m.has_optimizer),
        num_parameters=num_parameters(shapes["actor"]),
        num_trained=num_trained(shapes["actor"]) if shapes["actor"].adapter else None,
        devices_per_node=cfg.trainer.n_gpus_per_node,
        routed=RoutedBytes.of(cfg, shapes["actor"], server.kv_tokens),
        backup_bytes=server.weights if alone and hybrid and rollout.free_cache_engine and not on_cpu else 0,
    )


def _models(cfg: PPOConfig, shapes: Mapping[str, ModelShape], on_cpu: bool) -> Iterator[_Model]:
    actor, layout = cfg.actor_rollout_ref.actor, trained_layout(cfg)
    sizes = {"actor": (actor.megatron, layout, actor.max_tokens_per_micro_batch, actor.ppo_mini_batch_size)}
    for role in model_roles(cfg):
        mini = cfg.critic.ppo_mini_batch_size if role.name == "critic" else cfg.data.train_batch_size
        sizes[role.name] = (role.megatron, role.layout(cfg), role.max_tokens_per_micro_batch, mini)
    for name, (megatron, layout, max_tokens_per_micro_batch, mini) in sizes.items():
        samples = math.ceil(mini * cfg.actor_rollout_ref.rollout.n / layout.dp_size)
        is_base = any(role.name == name and refers_to_actor(cfg, role) for role in model_roles(cfg))
        # Pictures are in prompts.
        share = cfg.data.max_prompt_length / longest_sample(cfg)
        yield _model(name, shapes[name], megatron, layout, max_tokens_per_micro_batch, samples, on_cpu, is_base, share)


def _model(
    role: str,
    shape: ModelShape,
    megatron: MegatronConfig,
    sizes: LayoutSizes,
    max_tokens_per_micro_batch: int,
    num_micro_batches: int,
    on_cpu: bool,
    is_base: bool = False,
    picture_share: float = 1.0,
) -> _Model:
    layout = Layout(**vars(sizes))
    return _Model(
        role,
        shape,
        megatron,
        layout,
        stage_parameters(shape, layout),
        max_tokens_per_micro_batch,
        num_micro_batches,
        has_optimizer=role in ("actor", "critic"),
        on_cpu=on_cpu,
        is_base=is_base,
        picture_share=picture_share,
    )


def _named(role: str, parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{role} {part}": size for part, size in parts.items() if size}


def _all_resting(models: list[_Model], stage: int) -> dict[str, int]:
    bytes_by_part: dict[str, int] = {}
    for model in models:
        bytes_by_part |= _named(model.role, model.resting(stage))
    return bytes_by_part


def _saved(model: _Model, stage: int) -> dict[str, int]:
    """What a save of the model needs on the device."""
    return {name: size for name, size in _named(model.role, model.state(stage)).items() if "gradients" not in name}


def _save_copy(cfg: PPOConfig | SFTConfig, models: list[_Model], stage: int) -> int:
    return sum(model.save_copy(stage) for model in models) if cfg.trainer.async_save else 0


def _on_the_cpu(process: int, save_copy: int) -> dict[str, int]:
    """The host memory that counts as the device's: the copy of a save on a CPU, whose processes take nothing else."""
    return {} if process or not save_copy else {"save copy": save_copy}


def _serving(server: ServerBytes, process: int) -> dict[str, int]:
    rest = CONTEXT_BYTES + GRAPH_BYTES if process else 0
    own = {name: size for name, size in ((STATES, server.states), (ADAPTERS, server.adapters)) if size}
    return {"server weights": server.weights, "KV cache": server.kv_bytes} | own | {"server's rest": rest}


def _phases(
    cfg: PPOConfig,
    models: list[_Model],
    stage: int,
    server: ServerBytes | None,
    process: int,
    memory_bytes: int | None,
) -> Iterator[Phase]:
    """The phases of the devices on which the actor trains. server: the one that shares them."""
    rollout = cfg.actor_rollout_ref.rollout
    resting = _all_resting(models, stage) | ({"process": process} if process else {})
    resting |= _on_the_cpu(process, _save_copy(cfg, models, stage))
    serving = {} if server is None else _serving(server, process)
    # On the CPU servers release nothing, and are other processes of the same memory.
    released = {name: size for name, size in serving.items() if process and name in (ADAPTERS, "server's rest")}
    of_server = released if rollout.free_cache_engine else serving
    if serving:
        yield Phase("rollout", resting | serving)
    actor = models[0]
    for model in models:
        owner = actor if model.is_base else model
        state = _named(owner.role, owner.state(stage))
        weights = {name: size for name, size in state.items() if name.endswith(" weights")}
        output = "log-probs" if model.shape.head == "lm" else "values"
        yield Phase(f"{model.role} {output}", resting | weights | _named(model.role, model.forward(stage)) | of_server)
        if model.has_optimizer:
            yield Phase(f"{model.role} update", resting | state | _named(model.role, model.backward(stage)) | of_server)
            yield Phase(f"{model.role} step", resting | state | _named(model.role, model.step(stage)) | of_server)
    # One model is saved after the other.
    trained = [_saved(model, stage) for model in models if model.has_optimizer]
    saved = max(trained, key=lambda own: sum((resting | own).values()))
    # Saves and syncs come while a server has its weights, and not its KV cache.
    resumed = {
        name: size
        for name, size in serving.items()
        if name not in ("KV cache", STATES) or not rollout.free_cache_engine
    }
    save = resting | saved | resumed
    is_short = memory_bytes is not None and sum(save.values()) > memory_bytes
    # Where both do not fit, the server's weights leave for a save, and are sent again.
    yield Phase("save", resting | saved | of_server if released and rollout.free_cache_engine and is_short else save)
    weights = _named("actor", {"weights": actor.state(stage)["weights"]})
    held = resting | weights | resumed
    if process and rollout.verify_weights_every:
        tp_size = rollout.tensor_model_parallel_size
        # Beside each rank of a server is the trainer rank that makes its checksums; else one makes those of a replica.
        num_ranks = 1 if transport_of(cfg) == "shared" else tp_size
        hashed = hashed_expert_bytes(actor.shape, ITEMSIZE[rollout.dtype], tp_size, num_ranks=num_ranks)
        held |= {"checksums": hashed} if hashed else {}
    if not sends_adapter(cfg):
        held |= _named("actor", {"merged weight": FLOAT * actor.stages[stage].merged * (1 + (actor.itemsize < FLOAT))})
    free_bytes = None if memory_bytes is None else max(0, memory_bytes - sum(held.values()))
    bucket = _bucket_bytes(actor.itemsize * largest_tensor(actor.shape), rollout, free_bytes)
    yield Phase("weight sync", held | {"buckets": BUCKET_COPIES * bucket})


def _bucket_bytes(largest_bytes: int, rollout: RolloutConfig, free_bytes: int | None) -> int:
    """The bytes of a bucket of a weight sync.  free_bytes: of the device that nothing else takes; None: not known."""
    limit = rollout.update_weights_bucket_megabytes * _MIB
    if free_bytes is None:
        return max(limit, largest_bytes)
    return bucket_bytes_that_fit(free_bytes, limit_bytes=limit, largest_bytes=largest_bytes)


def _own_phases(model: _Model, stage: int, process: int, save_copy: int) -> Iterator[Phase]:
    """The phases of the devices of a role that has a pool for itself."""
    state = _named(model.role, model.state(stage)) | ({"process": process} if process else {})
    state |= _on_the_cpu(process, save_copy)
    weights = {name: size for name, size in state.items() if name.endswith((" weights", "process", "save copy"))}
    resting = _named(model.role, model.resting(stage))
    yield Phase(f"{model.role} forward", resting | weights | _named(model.role, model.forward(stage)))
    if model.has_optimizer:
        yield Phase(f"{model.role} update", state | _named(model.role, model.backward(stage)))
        yield Phase(f"{model.role} step", state | _named(model.role, model.step(stage)))


def _sft_plan(cfg: SFTConfig, shape: ModelShape, memory_bytes: int | None, on_cpu: bool) -> MemoryPlan:
    sizes = trained_layout(cfg)
    per_rank = math.ceil(cfg.data.train_batch_size / sizes.dp_size)
    model = _model("actor", shape, cfg.megatron, sizes, cfg.data.max_tokens_per_micro_batch, per_rank, on_cpu)
    process = 0 if on_cpu else PROCESS_BYTES
    devices = [
        DevicePlan(
            f"trainer, stage {stage}" if sizes.pp_size > 1 else "trainer",
            model.stages[stage].layers,
            list(_own_phases(model, stage, process, _save_copy(cfg, [model], stage))),
            _save_copy(cfg, [model], stage),
        )
        for stage in range(sizes.pp_size)
    ]
    return MemoryPlan(
        devices,
        memory_bytes,
        server=None,
        longest_sample=cfg.data.max_length,
        max_num_seqs=0,
        sync_bytes=0,
        checkpoint_bytes=checkpoint_bytes(shape, model.itemsize),
        num_parameters=num_parameters(shape),
        num_trained=num_trained(shape) if shape.adapter else None,
        devices_per_node=cfg.trainer.n_gpus_per_node,
    )
