"""Layouts of a run on a number of devices, by predicted tokens per second: those that fit, and why others do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from scalerl.base.files import GIB
from scalerl.config import PPOConfig, model_roles, violations_of
from scalerl.config.layout import LayoutSizes, longest_sample
from scalerl.config.names import ACTOR, HYBRID, ROLLOUT
from scalerl.config.servers import room_of_servers
from scalerl.config.suggestions import nearest_multiples
from scalerl.errors import UserError
from scalerl.extras.plan.check import known_memory
from scalerl.extras.plan.generation import generation_parts
from scalerl.extras.plan.hardware import Hardware
from scalerl.extras.plan.passes import Parts
from scalerl.extras.plan.plan import MemoryPlan, memory_plan
from scalerl.extras.plan.seconds import StepSeconds, lengths_of, step_of, step_seconds, training_parts
from scalerl.extras.plan.servers import server_bytes
from scalerl.extras.plan.suggest import Change, change_text, changed
from scalerl.models import ModelShape
from scalerl.trainer.checks.models import layouts_violations

# Of the memory, what a plan does not know stays free: buffers of collectives, fragments.
_MEMORY_FRAC = 0.95
# Layouts that are shown.
_SHOWN = 10
# Reasons that are shown, the most frequent ones.
_REASONS = 8
# Context parallelism leaves a rank at least so many tokens of the longest sample.
_CP_TOKENS = 2048
_MOST_PP, _MOST_TP = 16, 8
# Of the nodes, those that servers with devices of their own may have.
_SERVER_SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
_NO_CACHE = "rollout servers: their weights leave too small a KV cache"
_MEGATRON = f"{ACTOR}.megatron"
_MICRO = f"{ACTOR}.max_tokens_per_micro_batch"


@dataclass(frozen=True)
class _Candidate:
    """A layout with the least seconds that it can take: as if servers had all of the memory for their KV cache."""

    change: Change
    config: PPOConfig
    least: StepSeconds


@dataclass(frozen=True)
class Tuned:
    """A layout that fits.  change: key -> value."""

    change: Change
    config: PPOConfig
    step: StepSeconds
    plan: MemoryPlan


@dataclass(frozen=True)
class Tuning:
    """The fastest layouts that fit, and reason -> number of the others."""

    best: list[Tuned]
    fell_out: Counter[str]


def tune(
    cfg: PPOConfig,
    shapes: Mapping[str, ModelShape],
    devices: int,
    hardware: Hardware,
    mean_response: float | None = None,
) -> str:
    """The table of `scalerl plan --tune`.  Raises UserError for devices that do not divide, or of unknown memory."""
    memory_bytes = known_memory(cfg.trainer, "cpu")
    if memory_bytes is None:
        raise UserError("--tune: which layouts fit is not known; give --device-memory, such as h100")
    if pools := [role.section for role in model_roles(cfg) if role.has_own_pool]:
        raise UserError(
            f"--tune: ranks layouts of the actor's devices and the servers'; set {pools[0]}.resource_pool.nnodes=0"
        )
    memory_bytes = int(_MEMORY_FRAC * memory_bytes)
    found = tuned(cfg, shapes, devices, hardware, memory_bytes, mean_response)
    return "\n".join(_table(cfg, found, devices, hardware, memory_bytes, mean_response))


def tuned(
    cfg: PPOConfig,
    shapes: Mapping[str, ModelShape],
    devices: int,
    hardware: Hardware,
    memory_bytes: int,
    mean_response: float | None = None,
) -> Tuning:
    """The layouts are tried from the fastest on, each as if nothing but weights were beside the KV cache.

    Once the slowest of those that are shown is faster than what the next can be, all others are slower.
    """
    fell_out: Counter[str] = Counter()
    lengths = lengths_of(cfg, mean_response)
    candidates = _candidates(cfg, shapes, devices, hardware, memory_bytes, mean_response, fell_out)
    candidates.sort(key=lambda candidate: -candidate.least.tokens_per_s)
    best: list[Tuned] = []
    too_large: dict[str, str] = {}
    for number, candidate in enumerate(candidates):
        if len(best) >= _SHOWN and best[_SHOWN - 1].step.tokens_per_s >= candidate.least.tokens_per_s:
            fell_out["slower than those above"] += len(candidates) - number + len(best) - _SHOWN
            break
        reason = too_large.get(_trainer_text(candidate.config))
        if reason is None:
            plan = memory_plan(candidate.config, shapes, memory_bytes=memory_bytes)
            reason = _reason(candidate.config, plan, memory_bytes)
            if reason is not None and reason != _NO_CACHE:
                too_large[_trainer_text(candidate.config)] = reason
        if reason is not None:
            fell_out[reason] += 1
            continue
        assert plan.server is not None
        step = step_seconds(candidate.config, shapes, plan.server, hardware, lengths)
        best.append(Tuned(candidate.change, candidate.config, step, plan))
        best.sort(key=lambda one: -one.step.tokens_per_s)
    return Tuning(best[:_SHOWN], fell_out)


def _reason(cfg: PPOConfig, plan: MemoryPlan, memory_bytes: int) -> str | None:
    """Why a layout is none of the run: what is too large, or what the configuration's checks say."""
    if problems := plan.problems():
        pool, _, what = problems[0].partition(": ")
        if pool == "rollout servers":
            return _NO_CACHE
        return f"{pool.partition(',')[0]}: {what.partition(' takes ')[0]} takes more than {memory_bytes / GIB:.1f} GiB"
    broken = violations_of(cfg, device="cuda")
    return _short(broken[0]) if broken else None


def _short(violation: str) -> str:
    """A violation without the value, and what to set."""
    key, _, rest = violation.partition(" = ")
    return f"{key.rpartition('.')[2]}:{rest.partition(':')[2].partition(';')[0]}"


def _candidates(
    cfg: PPOConfig,
    shapes: Mapping[str, ModelShape],
    devices: int,
    hardware: Hardware,
    memory_bytes: int,
    mean_response: float | None,
    fell_out: Counter[str],
) -> list[_Candidate]:
    found, lengths = [], lengths_of(cfg, mean_response)
    for pool in _pools(cfg, devices):
        on_pool = changed(cfg, pool)
        servers = list(_servers(on_pool, shapes["actor"], hardware, memory_bytes, mean_response))
        for layout in _layouts(on_pool, shapes["actor"]):
            config = changed(on_pool, layout)
            sizes = LayoutSizes.of(config.actor_rollout_ref.actor.megatron, config.trainer.num_devices)
            samples = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
            broken = layouts_violations(config, shapes)
            if broken or samples < sizes.fewest_samples[0]:
                reason = _short(broken[0]) if broken else "an update has fewer samples than data-parallel ranks"
                fell_out[reason] += max(1, len(servers))
                continue
            training = training_parts(config, shapes, hardware, lengths)
            for server, gen in servers:
                if gen is None:
                    fell_out[_NO_CACHE] += 1
                    continue
                whole = changed(config, server)
                least = step_of(whole, {"gen": gen} | training, lengths)
                found.append(_Candidate(pool | layout | server, whole, least))
    return found


def _pools(cfg: PPOConfig, devices: int) -> Iterator[Change]:
    """The nodes of trainer and servers."""
    per_node = min(cfg.trainer.n_gpus_per_node, devices)
    if devices % per_node:
        raise UserError(
            f"--devices {devices}: must be a multiple of trainer.n_gpus_per_node = {per_node}; give --devices "
            f"{nearest_multiples(devices, per_node)}, or set trainer.n_gpus_per_node"
        )
    nodes = devices // per_node
    if cfg.actor_rollout_ref.hybrid_engine:
        yield {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": per_node}
        return
    if nodes < 2:
        raise UserError(f"--devices {devices}: {HYBRID} = false needs a node for the servers; set {HYBRID}=true")
    for of_servers in sorted({min(nodes - 1, max(1, round(nodes * share))) for share in _SERVER_SHARES}):
        yield {
            "trainer.nnodes": nodes - of_servers,
            "trainer.n_gpus_per_node": per_node,
            f"{ROLLOUT}.resource_pool.nnodes": of_servers,
            f"{ROLLOUT}.resource_pool.n_gpus_per_node": per_node,
        }


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _layouts(cfg: PPOConfig, shape: ModelShape) -> Iterator[Change]:
    """Trainer layouts whose copies are whole on the trainer's devices."""
    world, actor = cfg.trainer.num_devices, cfg.actor_rollout_ref.actor
    longest, own = longest_sample(cfg), actor.megatron.recompute_granularity
    tokens = actor.max_tokens_per_micro_batch // actor.megatron.context_parallel_size
    recomputes = list(dict.fromkeys([own, None, "full"]))
    sizes = product(
        _powers(min(_MOST_TP, cfg.trainer.n_gpus_per_node)),
        _powers(max(1, longest // _CP_TOKENS)),
        _powers(min(_MOST_PP, shape.num_layers // 2)),
        _powers(max(1, shape.num_experts)),
        recomputes,
    )
    for tp_size, cp_size, pp_size, ep_size, recompute in sizes:
        if world % (tp_size * cp_size * pp_size) or (world // pp_size) % ep_size:
            continue
        first, last = _ends(shape.num_layers, pp_size)
        aligned = math.lcm(2 * cp_size, cp_size * tp_size)
        needed = -(-longest // aligned) * aligned
        yield {
            f"{_MEGATRON}.tensor_model_parallel_size": tp_size,
            f"{_MEGATRON}.sequence_parallel": tp_size > 1,
            f"{_MEGATRON}.context_parallel_size": cp_size,
            f"{_MEGATRON}.pipeline_model_parallel_size": pp_size,
            f"{_MEGATRON}.virtual_pipeline_model_parallel_size": None,
            f"{_MEGATRON}.num_layers_in_first_pipeline_stage": first,
            f"{_MEGATRON}.num_layers_in_last_pipeline_stage": last,
            f"{_MEGATRON}.expert_model_parallel_size": ep_size,
            f"{_MEGATRON}.expert_tensor_parallel_size": 1 if shape.num_experts else None,
            f"{_MEGATRON}.recompute_granularity": recompute,
            _MICRO: max(tokens * cp_size, needed),
        }


def _ends(num_layers: int, pp_size: int) -> tuple[int | None, int | None]:
    """The layers of the first and the last stage, where the others cannot all have as many."""
    if num_layers % pp_size == 0:
        return None, None
    if pp_size == 2:
        return -(-num_layers // 2), num_layers // 2
    rest = num_layers - (pp_size - 2) * -(-num_layers // pp_size)
    if rest < 2:
        rest = num_layers - (pp_size - 2) * (num_layers // pp_size)
    return -(-rest // 2), rest // 2


def _servers(
    cfg: PPOConfig, shape: ModelShape, hardware: Hardware, memory_bytes: int, mean_response: float | None
) -> Iterator[tuple[Change, Parts | None]]:
    """The sizes of servers that fill the nodes, with their seconds if they had all of the memory.

    None: even then the longest sample does not fit their KV cache.
    """
    pool = cfg.trainer if cfg.actor_rollout_ref.hybrid_engine else cfg.actor_rollout_ref.rollout.resource_pool
    lengths = lengths_of(cfg, mean_response)
    for tp_size in _powers(pool.num_devices):
        change = {f"{ROLLOUT}.tensor_model_parallel_size": tp_size, f"{ROLLOUT}.num_replicas": None}
        config = changed(cfg, change)
        room = room_of_servers(config)
        if room.num_replicas * tp_size != pool.num_devices:
            continue
        server = server_bytes(shape, config.actor_rollout_ref.rollout, memory_bytes)
        is_room = (server.kv_tokens or 0) >= longest_sample(cfg)
        yield change, generation_parts(config, shape, server, hardware, lengths) if is_room else None


def _trainer_text(cfg: PPOConfig) -> str:
    """The layout of the trainer, as the table has it."""
    actor = cfg.actor_rollout_ref.actor
    layout = LayoutSizes.of(actor.megatron, cfg.trainer.num_devices)
    sizes = (layout.dp_size, layout.tp_size, layout.cp_size, layout.pp_size, layout.ep_size)
    return f"{''.join(f'{size:>5}' for size in sizes)}  {actor.megatron.recompute_granularity or '-':<10}"


def _table(
    cfg: PPOConfig,
    found: Tuning,
    devices: int,
    hardware: Hardware,
    memory_bytes: int,
    mean_response: float | None,
) -> Iterator[str]:
    lengths = lengths_of(cfg, mean_response)
    yield (
        f"{devices} {hardware.name} devices of {memory_bytes / GIB:.1f} GiB, responses of {lengths.mean:.0f} tokens on "
        f"average, {lengths.limit} at most"
    )
    sizes = "".join(f"{name:>5}" for name in ("dp", "tp", "cp", "pp", "ep"))
    yield f"tokens/s a device  step, s{sizes}  recompute   servers  peak, GiB  waits most for"
    for one in found.best:
        rollout = one.config.actor_rollout_ref.rollout
        peak = max(device.peak.num_bytes for device in one.plan.devices)
        room = room_of_servers(one.config)
        servers = f"{room.num_replicas}xtp{rollout.tensor_model_parallel_size}"
        yield (
            f"{one.step.tokens_per_s:>17,.0f}{one.step.total:>9,.0f}{_trainer_text(one.config)}{servers:>9}"
            f"{peak / GIB:>11.1f}  {one.step.limit}"
        )
    if found.best:
        yield ""
        yield "the first: " + change_text(_different(cfg, found.best[0].change))
    else:
        yield "no layout fits: take more or larger devices, or offload (actor.megatron.*_offload)"
    yield ""
    yield f"fell out: {sum(found.fell_out.values()):,} layouts"
    reasons = found.fell_out.most_common()
    for reason, number in reasons[:_REASONS]:
        yield f"{number:>9,}  {reason}"
    if len(reasons) > _REASONS:
        yield f"{sum(number for _, number in reasons[_REASONS:]):>9,}  other reasons"


def _different(cfg: PPOConfig, change: Change) -> Change:
    """What a change sets that the configuration does not have."""
    kept = {}
    for key, value in change.items():
        section = cfg
        *path, name = key.split(".")
        for part in path:
            section = getattr(section, part)
        if getattr(section, name) != value:
            kept[key] = value
    return kept
