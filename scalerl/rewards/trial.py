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


def trial_failures(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[str]:
    """Scores requests whose response is TRIAL_RESPONSE; returns the errors of those that failed, with the sample.

    As in a run, the manager's deadline holds. A failure that reward_model.on_error=zero tolerates is only logged.
    """
    if not requests:
        return []
    results = asyncio.run(_score_all(manager, requests))
    failures = []
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, ScoreResult):
            if result.error is not None:
                log.warning("sample %s scores 0 (reward_model.on_error=zero): %s", request.sample_name, result.error)
        elif isinstance(result, UserError | ValueError | OSError):
            failures.append(str(result))
        else:
            raise result
    return failures


async def _score_all(manager: RewardManager, requests: Sequence[ScoreRequest]) -> list[ScoreResult | BaseException]:
    return await asyncio.gather(*map(manager.scored, requests), return_exceptions=True)
