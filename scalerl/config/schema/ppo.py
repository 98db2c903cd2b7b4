"""The configuration of `scalerl train`, and the checks between its sections."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from scalerl.config.correction import corrects
from scalerl.config.layout import (
    DEVICE_KEYS,
    LONGEST_SAMPLE,
    LONGEST_SAMPLE_KEYS,
    LayoutSizes,
    alignment_keys,
    layout_keys,
    longest_sample,
    tokens_needed,
)
from scalerl.config.layout_checks import flash_attention_violations, whole_copies
from scalerl.config.names import (
    ACTOR,
    CORRECTION,
    DISTILLATION,
    ESTIMATORS,
    GROUP_ESTIMATORS,
    HYBRID,
    IMPORT_FILES,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    ROLLOUT,
)
from scalerl.config.roles import all_model_roles, different_sizes, model_roles, uses_critic, uses_reference
from scalerl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from scalerl.config.schema.algorithm import AlgorithmConfig
from scalerl.config.schema.data import DataConfig
from scalerl.config.schema.fields import Place, check
from scalerl.config.schema.model import PolicyModelConfig
from scalerl.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig
from scalerl.config.schema.rollout import RolloutConfig
from scalerl.config.schema.trainer import TrainerConfig
from scalerl.config.servers import engines_with, num_replicas, replica_violations, room_of_servers, traits_of
from scalerl.config.suggestions import divisors, nearest, nearest_multiples
from scalerl.config.value_checks import show

_REF = "actor_rollout_ref.ref"
_POOL = f"{ROLLOUT}.resource_pool"
_TP_SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
_TRANSPORT = f"{ROLLOUT}.weight_transport"
_VERIFY = f"{ROLLOUT}.verify_weights_every"
_STALENESS, _PARTIAL = "trainer.max_staleness", f"{ROLLOUT}.partial_rollout"
_GEN, _TRAIN = "data.gen_batch_size", "data.train_batch_size"
_FILTER, _ESTIMATOR = "algorithm.filter_groups", "algorithm.adv_estimator"
_MINI, _CRITIC_MINI = f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"
_REPLAY = "algorithm.routing_replay"
_TURN_LEVEL = "algorithm.turn_level"
_KL_SWITCHES = (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
_TOP_K, _COEF = "algorithm.distillation_top_k", "algorithm.distillation_coef"
_TEACHER = f"{_REF}.model_path"
# The keys that say which models a run has.
_ROLES = (*_KL_SWITCHES, _ESTIMATOR, _TOP_K, f"{_REF}.url", "reward_model.enable")


@dataclass
class ActorRolloutRefConfig:
    """The policy: the model, its training, its reference and its servers."""

    # True: trainer and rollout share devices. False: the servers have those of rollout.resource_pool.
    hybrid_engine: bool = True
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    @check("hybrid_engine", "rollout.resource_pool.nnodes")
    def pool_of_the_servers(self, at: Place) -> Iterator[str]:
        pool = self.rollout.resource_pool
        if self.hybrid_engine and pool.nnodes:
            yield (
                f"{_POOL}.nnodes = {pool.nnodes}: has no effect when {HYBRID} = true, the servers are on the trainer's "
                f"devices; set {HYBRID}=false, or {_POOL}.nnodes=0"
            )
        if not self.hybrid_engine and not pool.nnodes:
            yield (
                f"{_POOL}.nnodes = 0: needed when {HYBRID} = false, the servers have devices of their own; set "
                f"{_POOL}.nnodes=1 and {_POOL}.n_gpus_per_node={pool.n_gpus_per_node}, or more of them, or "
                f"{HYBRID}=true"
            )

    @check("hybrid_engine", "rollout.weight_transport", "trainer.device")
    def transport_reaches_the_servers(self, at: Place) -> Iterator[str]:
        transport = self.rollout.weight_transport
        if transport == "shared" and not self.hybrid_engine:
            yield (
                f"{_TRANSPORT} = shared: trainer and servers share memory only where they share devices, {HYBRID} = "
                f"false; set {_TRANSPORT}=auto, broadcast or disk"
            )
        if transport == "broadcast" and self.hybrid_engine and at.device == "cuda":
            yield (
                f"{_TRANSPORT} = broadcast: NCCL does not send between processes on one GPU, where trainer and servers "
                f"are when {HYBRID} = true; set {_TRANSPORT}=auto or disk, or {HYBRID}=false and {_POOL}.nnodes=1"
            )


@dataclass
class PPOConfig:
    """Configuration of `scalerl train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    # The trained model on its devices

    @check(*layout_keys(f"{ACTOR}.megatron", "trainer"))
    def devices_hold_whole_copies(self, at: Place) -> Iterator[str]:
        yield from whole_copies(self.actor_rollout_ref.actor.megatron, self.trainer, f"{ACTOR}.megatron", "trainer")

    @check("trainer.flash_attention_impl", f"{ACTOR}.megatron.cp_comm_type", f"{ACTOR}.megatron.dtype")
    def flash_attention_is_called(self, at: Place) -> Iterator[str]:
        megatron = self.actor_rollout_ref.actor.megatron
        yield from flash_attention_violations(self.trainer.flash_attention_impl, megatron, f"{ACTOR}.megatron")

    # Batches

    @check(_TRAIN)
    def mini_batches_divide_the_batch(self, at: Place) -> Iterator[str]:
        prompts = self.data.train_batch_size
        mini_batches = {_MINI: self.actor_rollout_ref.actor.ppo_mini_batch_size}
        if at.knows(_ESTIMATOR) and uses_critic(self) and self.critic.ppo_mini_batch_size != mini_batches[_MINI]:
            mini_batches[_CRITIC_MINI] = self.critic.ppo_mini_batch_size
        for key, mini in mini_batches.items():
            if at.knows(key) and prompts % mini:
                yield (
                    f"{key} = {mini}: must divide {_TRAIN} = {prompts}; set {key}={nearest(mini, divisors(prompts))}, "
                    f"or {_TRAIN}={nearest_multiples(prompts, mini)}"
                )

    @check(f"{ROLLOUT}.n", *DEVICE_KEYS)
    def mini_batches_feed_ranks(self, at: Place) -> Iterator[str]:
        actor, n, told = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout.n, set()
        layout = LayoutSizes.of(actor.megatron, self.trainer.num_devices)
        models = [(_MINI, actor.ppo_mini_batch_size, layout, layout_keys(f"{ACTOR}.megatron", "trainer"))]
        for role in model_roles(self) if at.knows(*_ROLES) else ():
            if role.name == "critic":
                keys = layout_keys("critic.megatron", "critic.resource_pool")
                models.append((_CRITIC_MINI, self.critic.ppo_mini_batch_size, role.layout(self), keys))
        for key, mini, layout, keys in models:
            if not at.knows(key, *keys):
                continue
            needed, ranks = layout.fewest_samples
            # A critic with the actor's number on as many ranks follows the actor.
            if mini * n < needed and (mini, needed) not in told:
                told.add((mini, needed))
                yield (
                    f"{key} x {ROLLOUT}.n = {mini} x {n} = {mini * n} samples: must be at least the {ranks}; set "
                    f"{key}={math.ceil(needed / n)} or more, or train on fewer devices"
                )

    @check(*LONGEST_SAMPLE_KEYS)
    def longest_sample_fits(self, at: Place) -> Iterator[str]:
        actor, longest, told = self.actor_rollout_ref.actor, longest_sample(self), set()
        models = [(ACTOR, actor.max_tokens_per_micro_batch, actor.megatron)]
        if at.knows(*_ROLES):
            models += [(role.section, role.max_tokens_per_micro_batch, role.megatron) for role in model_roles(self)]
        for section, tokens, megatron in models:
            key = f"{section}.max_tokens_per_micro_batch"
            if not at.knows(key, *alignment_keys(f"{section}.megatron")):
                continue
            needed = tokens_needed(longest, megatron)
            # A role with the actor's number on the actor's layout follows the actor.
            if tokens < needed and (tokens, needed) not in told:
                told.add((tokens, needed))
                yield (
                    f"{key} = {tokens}: must hold the longest sample, {LONGEST_SAMPLE} = {longest}; set {key}={needed} "
                    "or more"
                )

    # Servers

    @check(HYBRID, f"{ROLLOUT}.name", _TP_SIZE, f"{ROLLOUT}.num_replicas", _POOL, *DEVICE_KEYS, "trainer.device")
    def replicas_fit(self, at: Place) -> Iterator[str]:
        rollout, room = self.actor_rollout_ref.rollout, room_of_servers(self)
        if not self.actor_rollout_ref.hybrid_engine:
            if rollout.resource_pool.nnodes:
                yield from replica_violations(rollout, ROLLOUT, room, _POOL)
            return
        # On a CPU a device is a process, and any number of servers share one machine with the trainer. On several nodes
        # an engine rank is fed by a rank on its node.
        on_gpus = at.device == "cuda"
        if on_gpus or self.trainer.nnodes > 1:
            counts = on_gpus or room.nodes_each > 1
            yield from replica_violations(rollout, ROLLOUT, room, "trainer", fills_nodes=True, counts=counts)

    @check(HYBRID, f"{ROLLOUT}.num_workers", _TP_SIZE, f"{ROLLOUT}.num_replicas", _POOL, *DEVICE_KEYS)
    def workers_have_servers(self, at: Place) -> Iterator[str]:
        num_workers, num_servers = self.actor_rollout_ref.rollout.num_workers, num_replicas(self)
        if num_workers is not None and num_workers > num_servers:
            yield (
                f"{ROLLOUT}.num_workers = {num_workers}: each needs a server, there are {num_servers}; set "
                f"{ROLLOUT}.num_workers={num_servers} or less, or null"
            )

    @check(HYBRID, _TRANSPORT, _TP_SIZE, _VERIFY, _POOL, *DEVICE_KEYS)
    def weight_files_are_read_on_every_node(self, at: Place) -> Iterator[str]:
        rollout, nodes = self.actor_rollout_ref.rollout, room_of_servers(self).nodes_each
        if rollout.weight_transport == "disk" and nodes > 1 and rollout.verify_weights_every != 1:
            yield (
                f"{_VERIFY} = {rollout.verify_weights_every}: must be 1 when {_TRANSPORT} = disk and a replica is on "
                f"{nodes} nodes ({_TP_SIZE} = {rollout.tensor_model_parallel_size}): SGLang says what its first node "
                f"has read, and another that could not read the files keeps its old weights; set {_VERIFY}=1, or "
                f"{_TRANSPORT}=auto"
            )

    # Samples of a step

    @check(_GEN, _TRAIN, _STALENESS, HYBRID)
    def over_sampling_of_one_step(self, at: Place) -> Iterator[str]:
        begun, batch, bound = self.data.gen_batch_size, self.data.train_batch_size, self.trainer.max_staleness
        if begun > batch and bound and not self.actor_rollout_ref.hybrid_engine:
            yield (
                f"{_GEN} = {begun}: over-sampling ends what the servers run, and with {_STALENESS} = {bound} they run "
                f"the next steps' prompts too; set {_GEN}={batch}"
            )

    @check(_FILTER, f"{ROLLOUT}.n", "reward_model.enable")
    def filtered_groups(self, at: Place) -> Iterator[str]:
        if not self.algorithm.filter_groups.enable:
            return
        if self.actor_rollout_ref.rollout.n == 1:
            yield (
                f"{ROLLOUT}.n = 1: {_FILTER}.enable drops groups whose samples are alike, and those of a group of one "
                f"are; set {ROLLOUT}.n=2 or more"
            )
        if self.reward_model.enable:
            yield (
                f"{_FILTER}.enable = true: a reward model scores when generation is over, so that nothing can be "
                f"refilled; set reward_model.enable=false, or {_FILTER}.enable=false"
            )

    @check(_STALENESS, _PARTIAL, HYBRID, _GEN, _TRAIN, CORRECTION)
    def samples_of_older_policies(self, at: Place) -> Iterator[str]:
        bound, partial = self.trainer.max_staleness, self.actor_rollout_ref.rollout.partial_rollout
        lacks = list(self._lacks_of_older_samples()) if bound or partial else []
        if lacks:
            key, value = (_PARTIAL, "true") if partial else (_STALENESS, bound)
            ways = [f"{_PARTIAL}=false"] if partial else []
            ways += [f"{_STALENESS}=0"] if bound else []
            pool = f"{HYBRID}=false and {_POOL}.nnodes=1"
            own = f"; or give the servers devices of their own: {pool}" if self.actor_rollout_ref.hybrid_engine else ""
            yield (
                f"{key} = {value}: {', and '.join(why for why, _ in lacks)}; set "
                f"{' and '.join(setting for _, settings in lacks for setting in settings)}, or {' and '.join(ways)}"
                f"{own}"
            )

    def _lacks_of_older_samples(self) -> Iterator[tuple[str, list[str]]]:
        """What training on samples of older policies lacks: (why, settings that provide it)."""
        batch, correction = self.data.train_batch_size, self.algorithm.rollout_correction
        if not self.trainer.max_staleness:
            yield (
                f"an interrupted sample is continued by a newer policy, which {_STALENESS} = 0 forbids",
                [f"{_STALENESS}=1"],
            )
        if self.actor_rollout_ref.hybrid_engine:
            if not self.actor_rollout_ref.rollout.partial_rollout:
                yield (
                    "servers on the trainer's devices cannot generate while it computes, and can only continue "
                    "unfinished samples",
                    [f"{_PARTIAL}=true"],
                )
            if self.data.gen_batch_size <= batch:
                # Half as many again: those that are unfinished when the others fill the batch.
                yield (
                    f"nothing is left unfinished while {_GEN} = {_TRAIN} = {batch}",
                    [f"{_GEN}={batch + max(1, batch // 2)}"],
                )
        if not corrects(correction):
            settings = [f"{CORRECTION}.bypass_mode=false"] if correction.bypass_mode else []
            yield (
                "samples of an older policy need a correction of the loss",
                [*settings, f"{CORRECTION}.rollout_is=token"],
            )

    # The algorithm

    @check(f"{ROLLOUT}.n", _ESTIMATOR)
    def groups_have_a_baseline(self, at: Place) -> Iterator[str]:
        name = self.algorithm.adv_estimator
        if name in GROUP_ESTIMATORS and self.actor_rollout_ref.rollout.n == 1:
            yield (
                f"{ROLLOUT}.n = 1: {_ESTIMATOR} = {name} compares the samples of one prompt, so a group of one has no "
                f"baseline; set {ROLLOUT}.n=2 or more, for example {ROLLOUT}.n=8"
            )

    @check(_ESTIMATOR, _TOP_K, _TEACHER, f"{_REF}.url", f"{CORRECTION}.bypass_mode")
    def distillation_has_a_teacher(self, at: Place) -> Iterator[str]:
        top_k, reference = self.algorithm.distillation_top_k, self.actor_rollout_ref.ref
        is_estimated = self.algorithm.adv_estimator == DISTILLATION
        asked = f"{_ESTIMATOR} = {DISTILLATION}" if is_estimated else f"{_TOP_K} = {top_k}"
        if (is_estimated or top_k) and reference.model_path is None and reference.url is None:
            yield (
                f"{asked}: the reference model is the teacher, and without a path it is the policy itself, which it "
                f"has nothing to teach; set {_TEACHER}=teacher, the teacher's directory, or {_REF}.url, the address of "
                "a server that has it"
            )
        if is_estimated and self.algorithm.rollout_correction.bypass_mode:
            yield (
                f"{asked} compares the trainer's log-probs with the teacher's, and {CORRECTION}.bypass_mode=true "
                f"leaves them out; set {CORRECTION}.bypass_mode=false"
            )

    @check(_TOP_K, _COEF, _TEACHER, f"{_REF}.url")
    def distillation_is_on(self, at: Place) -> Iterator[str]:
        coef, reference = self.algorithm.distillation_coef, self.actor_rollout_ref.ref
        if coef != AlgorithmConfig.distillation_coef and not self.algorithm.distillation_top_k:
            teacher = f" and {_TEACHER}=teacher" if reference.model_path is None and reference.url is None else ""
            yield (
                f"{_COEF} = {coef:g}: has no effect when {_TOP_K} = 0; set {_TOP_K}=32{teacher}, or leave {_COEF} out"
            )

    @check(f"{_REF}.url", f"{ROLLOUT}.temperature")
    def server_gives_log_probs_of_the_run(self, at: Place) -> Iterator[str]:
        url, temperature = self.actor_rollout_ref.ref.url, self.actor_rollout_ref.rollout.temperature
        if url is not None and temperature != 1.0:
            yield (
                f"{ROLLOUT}.temperature = {temperature:g}: a server gives a prompt's log-probs at temperature 1 alone "
                f"({_REF}.url = {url}); set {ROLLOUT}.temperature=1, or {_REF}.url=null and {_TEACHER}=teacher"
            )

    @check(_TURN_LEVEL, _ESTIMATOR, f"{ROLLOUT}.program")
    def turns_are_compared(self, at: Place) -> Iterator[str]:
        name = self.algorithm.adv_estimator
        if not self.algorithm.turn_level:
            return
        if name in ESTIMATORS.own and name not in GROUP_ESTIMATORS:
            yield (
                f"{_TURN_LEVEL} = true: {_ESTIMATOR} = {name} gives each token an advantage, from the rewards of turns "
                f"too; set {_TURN_LEVEL}=false"
            )
        elif not self.actor_rollout_ref.rollout.program.is_users_own:
            yield (
                f"{_TURN_LEVEL} = true: has no effect without {ROLLOUT}.program, whose samples have turns; set "
                f"{_TURN_LEVEL}=false"
            )

    @check(_ESTIMATOR, "reward_model.enable")
    def greedy_baseline_is_scored(self, at: Place) -> Iterator[str]:
        if self.algorithm.adv_estimator == "remax" and self.reward_model.enable:
            yield (
                f"{_ESTIMATOR} = remax: its greedy responses are scored by the reward function as they come, and a "
                "reward model scores when generation is over; set reward_model.enable=false, or another estimator"
            )

    @check(_REPLAY, f"{ROLLOUT}.name")
    def servers_say_their_experts(self, at: Place) -> Iterator[str]:
        name = self.actor_rollout_ref.rollout.name
        if self.algorithm.routing_replay == "rollout" and not traits_of(name).returns_experts:
            names = engines_with(lambda traits: traits.returns_experts)
            yield (
                f"{_REPLAY} = rollout: servers of {ROLLOUT}.name = {name} do not say which experts their routers "
                f"chose; set {ROLLOUT}.name={names}, or {_REPLAY}=null"
            )

    @check(IMPORT_FILES)
    def names_are_registered(self, at: Place) -> Iterator[str]:
        # Names that files of the user's own register are known once these are imported; the registry checks them then.
        if self.trainer.import_files:
            return
        for names, name in (
            (ESTIMATORS, self.algorithm.adv_estimator),
            (POLICY_LOSSES, self.actor_rollout_ref.actor.policy_loss.loss_mode),
            (REWARD_MANAGERS, self.reward_model.reward_manager),
        ):
            if at.knows(names.key) and name not in names:
                yield names.unknown(name)

    # Reference, critic and reward model

    @check(*_ROLES)
    def roles_on_their_devices(self, at: Place) -> Iterator[str]:
        actor = self.actor_rollout_ref.actor.megatron
        for role in all_model_roles(self):
            pool, megatron = f"{role.section}.resource_pool", f"{role.section}.megatron"
            # Whether a user's own estimator asks for a critic is known once its file is imported.
            may_be_active = role.name == "critic" and self.algorithm.adv_estimator not in ESTIMATORS
            if role.has_own_pool and at.knows(*layout_keys(megatron, pool)):
                if role.active:
                    yield from whole_copies(role.megatron, role.pool, megatron, pool)
                elif not may_be_active:
                    path = "" if role.model_path else f" and {role.section}.model.path=DIRECTORY"
                    yield (
                        f"{pool}.nnodes = {role.pool.nnodes}: has no effect, this run has no {role.section}; set "
                        f"{role.switch}{path}, or {pool}.nnodes=0"
                    )
            keys = layout_keys(megatron, ACTOR)
            shares = role.active and not role.has_own_pool and at.knows(pool, f"{ACTOR}.megatron", *keys)
            for size in different_sizes(role, actor) if shares else ():
                yield (
                    f"{megatron}.{size} = {show(getattr(role.megatron, size))}: shares the actor's processes, whose "
                    f"{ACTOR}.megatron.{size} is {show(getattr(actor, size))}; set it to that, or give the "
                    f"{role.section} separate devices with {pool}.nnodes=1"
                )

    @check(_TEACHER, f"{_REF}.url", *_ROLES)
    def reference_is_used(self, at: Place) -> Iterator[str]:
        if uses_reference(self):
            return
        for name in ("model_path", "url"):
            if (given := getattr(self.actor_rollout_ref.ref, name)) is not None:
                yield (
                    f"{_REF}.{name} = {given}: has no effect when {' and '.join(_KL_SWITCHES)} are false; set "
                    f"{_KL_SWITCHES[0]}=true or {_KL_SWITCHES[1]}=true, or {_REF}.{name}=null"
                )

    @check("trainer.critic_warmup", _ESTIMATOR)
    def critic_warms_up(self, at: Place) -> Iterator[str]:
        has_none = not uses_critic(self) and self.algorithm.adv_estimator in ESTIMATORS
        if self.trainer.critic_warmup and has_none:
            yield (
                f"trainer.critic_warmup = {self.trainer.critic_warmup}: this run has no critic that could learn first; "
                f"set {_ESTIMATOR}=gae, or trainer.critic_warmup=0"
            )

    def lines_without_effect(self, set_keys: Collection[str]) -> Iterator[str]:
        """Yields a line for the sampling of validations that the user set, which are greedy by default."""
        section, sampling = f"{ROLLOUT}.val_kwargs", self.actor_rollout_ref.rollout.val_kwargs
        idle = [key for name in ("temperature", "top_p", "top_k") if (key := f"{section}.{name}") in set_keys]
        if idle and not sampling.do_sample and f"{section}.do_sample" not in set_keys:
            yield (
                f"{', '.join(idle)}: no effect, as validations are greedy; set {section}.do_sample=true for samples, "
                "or false to say so"
            )

    def sections_without_checks(self) -> set[str]:
        """Sections of models that this run does not have, and those with the values of the actor's section."""
        actor = self.actor_rollout_ref.actor
        roles = all_model_roles(self)
        unused = {f"{role.section}.megatron" for role in roles if not role.active or role.megatron == actor.megatron}
        return unused if uses_critic(self) else {*unused, "critic.optim"}
