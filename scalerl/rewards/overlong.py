"""The reward manager `dapo`: the naive manager, with a penalty for responses near their length limit."""

from __future__ import annotations

from dataclasses import replace

from scalerl.config.schema import OverlongBufferConfig, RewardModelConfig
from scalerl.rewards.manager import NaiveRewardManager, ScoreRequest, ScoreResult, register_reward_manager
from scalerl.rewards.reward_function import RewardFunction


def overlong_penalty(response_length: int, buffer: OverlongBufferConfig) -> float:
    """Penalty of a response's length: 0 up to max_resp_len - len tokens, then falling linearly.

    It is -penalty_factor at max_resp_len, and falls further beyond it.
    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment).
    """
    over = response_length - (buffer.max_resp_len - buffer.len)
    return -buffer.penalty_factor * over / buffer.len if over > 0 else 0.0


@register_reward_manager("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Adds overlong_penalty, as a penalty, to the naive manager's results, with reward_model.overlong_buffer.enable.

    A failed sample has none. With overlong_buffer.log, extra has overlong (1 if penalized) and overlong_reward (the
    penalty).
    """

    def __init__(self, function: RewardFunction, config: RewardModelConfig) -> None:
        buffer = config.overlong_buffer
        if buffer.enable and not 0 < buffer.len <= buffer.max_resp_len:
            raise ValueError(
                f"reward_model.overlong_buffer.len={buffer.len}: use 1 to max_resp_len={buffer.max_resp_len} tokens "
                "(the paper: 4096 of 20480), or set enable=false"
            )
        super().__init__(function, config)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        result = await super().score(request)
        buffer = self._config.overlong_buffer
        if not buffer.enable:
            return result
        if request.response_length is None:
            raise ValueError(f"sample {request.sample_name}: reward_manager=dapo needs its response_length")
        penalty = 0.0 if result.error is not None else overlong_penalty(request.response_length, buffer)
        logged = {"overlong": float(penalty < 0), "overlong_reward": penalty} if buffer.log else {}
        return replace(result, extra=result.extra | logged, penalty=penalty)
