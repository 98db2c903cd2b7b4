"""`Slot`, a sample of a request while a server generates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, RolloutError, SampleKey


@dataclass(frozen=True)
class Slot:
    """A sample being generated.  room: number of tokens that it may still get."""

    request_id: int | str
    sample_index: int
    seed: int | None
    room: int
    output_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[tuple[int, int], ...]

    @property
    def key(self) -> SampleKey:
        return self.request_id, self.sample_index

    def extended(
        self, output_ids: list[int], logprobs: list[float], spans: Sequence[tuple[int, int]], finish_reason: str
    ) -> GenerateOutput:
        """The sample with further tokens appended.  spans: version spans of the new tokens.

        Raises RolloutError for more tokens than there is room for.
        """
        if len(output_ids) > self.room:
            raise RolloutError(
                f"request {self.request_id!r} sample {self.sample_index}: the server sent {len(output_ids)} tokens, at "
                f"most {self.room} were asked for"
            )
        merged = list(self.version_spans) if self.output_ids else []
        for start, version in spans if output_ids or not merged else ():
            if not merged or merged[-1][1] != version:
                merged.append((len(self.output_ids) + start, version))
        return GenerateOutput(
            request_id=self.request_id,
            sample_index=self.sample_index,
            output_ids=self.output_ids + output_ids,
            logprobs=self.logprobs + logprobs,
            finish_reason=finish_reason,
            policy_version=merged[0][1],
            version_spans=tuple(merged),
        )


def slots_of(request: GenerateRequest, max_model_len: int) -> list[Slot]:
    """The samples of a request, in order, with the tokens that they have from before an interruption."""
    budget = min(request.sampling.max_new_tokens, max_model_len - len(request.input_ids))
    seeds = request.seeds or [None] * request.n
    if not request.progress:
        return [Slot(*key, seed, budget, [], [], ()) for key, seed in zip(request.sample_keys(), seeds, strict=True)]
    return [
        Slot(*o.key, seed, budget - len(o.output_ids), o.output_ids, o.logprobs, o.version_spans)
        for o, seed in zip(request.progress, seeds, strict=True)
    ]
