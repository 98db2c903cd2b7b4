"""`generate_samples`: many prompts on several rollout servers; every sample comes back once, finished or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scalerl.rollout.dispatcher import Dispatcher, Recovery
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, SampleKey

# Request id -> its samples, all finished; in the order in which they were completed.
Groups = Mapping[int | str, Sequence[GenerateOutput]]


async def generate_samples(
    clients: Sequence[RolloutClient],
    requests: Sequence[GenerateRequest],
    on_output: Callable[[GenerateOutput], None] | None = None,
    *,
    stop_when: Callable[[Groups], bool] | None = None,
    continue_aborted: bool = False,
    recovery: Recovery | None = None,
) -> list[GenerateOutput]:
    """Generates one output per sample, ordered as the requests, then by sample index.

    on_output: sees each output as soon as it arrives.
    stop_when: asked after every output and every STOP_POLL_S; when true, everything else is ended, as
        `Dispatcher.stop_when`. `unfinished_requests` says how to go on.
    continue_aborted: ask again for the rest of a sample that somebody else aborted (`RolloutClient.pause`) instead of
        handing it back; its new tokens carry the version of their weights.
    recovery: a server that is gone, or that does not answer a request in its time and then no health check either, is
        lost: what it had goes to the others, and to its successor once there is one.

    Raises ValueError on a request that cannot be sent or an id that is used twice. Raises RolloutError when a sample is
    lost or doubled, and when a server fails that `recovery` does not bring back; nothing is left running then.
    """
    if not clients:
        raise ValueError("generate_samples: no rollout servers")
    outputs: dict[SampleKey, GenerateOutput] = {}
    sizes = {request.request_id: request.n for request in requests}
    finished: dict[int | str, list[GenerateOutput]] = {}
    complete: dict[int | str, list[GenerateOutput]] = {}

    def keep(output: GenerateOutput) -> None:
        outputs[output.key] = output
        if output.finished:
            group = finished.setdefault(output.request_id, [])
            group.append(output)
            if len(group) == sizes[output.request_id]:
                complete[output.request_id] = sorted(group, key=lambda o: o.sample_index)
        if on_output is not None:
            on_output(output)

    dispatcher = Dispatcher(
        clients,
        keep,
        stop_when=None if stop_when is None else lambda: stop_when(complete),
        continue_aborted=continue_aborted,
        recovery=recovery,
    )
    for request in requests:
        dispatcher.add(request)
    await dispatcher.run(lambda: dispatcher.is_idle)
    return [outputs[key] for request in requests for key in request.sample_keys()]
