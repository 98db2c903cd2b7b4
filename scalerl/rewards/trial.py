"""Trial scores of a few rows, which find problems of a reward before a run starts anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from scalerl.errors import UserError
from scalerl.rewards.manager import RewardManager, ScoreRequest, ScoreResult

log = logging.getLogger(__name__)

# Takes the place of a sampled response; a reward function that must recognize a trial can compare with it.
TRIAL_RESPONSE = "I do not know."


def trial_results(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[ScoreResult | str]:
    """Scores requests whose response is TRIAL_RESPONSE; the error, with the sample, stands for a result that failed.

    As in a run, the manager's deadline holds. A failure that reward_model.on_error=zero tolerates is only logged.
    """
    results: list[ScoreResult | str] = []
    for request, result in zip(requests, asyncio.run(_score_all(manager, requests)), strict=True):
        if isinstance(result, ScoreResult):
            if result.error is not None:
                log.warning(
                    "sample %s counts as wrong (reward_model.on_error=zero): %s", request.sample_name, result.error
                )
            results.append(result)
        elif isinstance(result, UserError | ValueError | OSError):
            results.append(str(result))
        else:
            raise result
    return results


async def _score_all(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[ScoreResult | BaseException]:
    return await asyncio.gather(*map(manager.scored, requests), return_exceptions=True)
