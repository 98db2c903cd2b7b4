"""What the rest of scalerl may rely on, held against both engines; transformers is the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, RolloutError, SamplingParams
from scalerl.rollout.servers.connection import authorization
from scalerl.rollout.servers.requests import unfinished_requests
from scalerl.rollout.servers.supervise import descendants
from tests.gpu import conftest as gpu
from tests.served_weights import expected_checksums, serialize_bucket
from tests.sglang.conftest import MAX_MODEL_LEN, ONE_TOKEN, PROMPTS, Engine, Model
from tests.tiny_models import EOS_ID

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
LONG = SamplingParams(max_new_tokens=90, temperature=1.0, ignore_eos=True)


def requests_for(prompts: list[list[int]], sampling: SamplingParams, n: int = 1) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"p{row}", prompt, n, sampling, [1000 * row + i for i in range(n)])
        for row, prompt in enumerate(prompts)
    ]


def assert_logprobs_match(model: Model, prompt: list[int], output: GenerateOutput, temperature: float) -> None:
    expected = model.logprobs(prompt, output.output_ids, temperature)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.shows("serve", family="qwen3", server="shared_engine")
def test_greedy_tokens_logprobs_and_finish_reasons_are_those_of_transformers(engine: Engine, model_a: Model) -> None:
    outputs = engine.generate(requests_for(PROMPTS, GREEDY))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.output_ids == model_a.greedy(prompt, GREEDY.max_new_tokens)
        assert_logprobs_match(model_a, prompt, output, temperature=1.0)
        assert output.finish_reason == ("stop" if output.output_ids[-1] == EOS_ID else "length")
    # The prompts are chosen so that both ways to finish occur.
    assert {output.finish_reason for output in outputs} == {"stop", "length"}


@pytest.mark.parametrize("sampling", [
    SamplingParams(max_new_tokens=12, temperature=1.0),
    SamplingParams(max_new_tokens=12, temperature=0.7),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.5, top_k=20),
], ids=["T1", "T0.7", "T0.7-top_p-top_k"])  # fmt: skip
def test_sampled_logprobs_are_of_the_tempered_softmax(engine: Engine, model_a: Model, sampling: SamplingParams) -> None:
    outputs = engine.generate(requests_for(PROMPTS, sampling, n=4))
    assert [(o.request_id, o.sample_index) for o in outputs] == [
        (f"p{row}", i) for row in range(len(PROMPTS)) for i in range(4)
    ]
    for output in outputs:
        assert_logprobs_match(model_a, PROMPTS[int(str(output.request_id)[1:])], output, sampling.temperature)
    assert len({tuple(output.output_ids) for output in outputs[:4]}) > 1


def test_top_p_and_top_k_choose_among_the_likely_tokens(engine: Engine, model_a: Model) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.3, top_k=5)
    probs = model_a.logits(PROMPTS[0])[-1].softmax(-1)
    ordered, order = probs.sort(descending=True)
    nucleus = int(((ordered.cumsum(0) - ordered) <= 0.3).sum())
    allowed = set(order[: min(nucleus, 5)].tolist())
    outputs = engine.generate(requests_for([PROMPTS[0]], sampling, n=16))
    assert {output.output_ids[0] for output in outputs} <= allowed
    assert len(allowed) < 16


@pytest.mark.parametrize("shared_engine", ["sglang"], indirect=True)
def test_what_tests_of_gpus_ask_is_answered(engine: Engine, model_a: Model) -> None:
    outputs = gpu.generate(engine.client, 8)
    tokens = [model_a.greedy(prompt, 8) for prompt in gpu.PROMPTS]
    assert [output.output_ids[: len(mine)] for output, mine in zip(outputs, tokens, strict=True)] == tokens


def test_ignore_eos_goes_on_to_the_length(engine: Engine, model_a: Model) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    stopped = [p for p in PROMPTS if model_a.greedy(p, 24)[-1] == EOS_ID]
    for output in engine.generate(requests_for(stopped, sampling)):
        assert len(output.output_ids) == 24
        assert output.finish_reason == "length"


def test_prompt_and_response_share_max_model_len(engine: Engine) -> None:
    sampling = SamplingParams(max_new_tokens=1000, temperature=0.0, ignore_eos=True)
    for prompt_length in (1, MAX_MODEL_LEN - 1):
        prompt = [7 + i % 400 for i in range(prompt_length)]
        (output,) = engine.generate(requests_for([prompt], sampling))
        assert len(output.output_ids) == MAX_MODEL_LEN - prompt_length
    # A prompt at the limit is whole without a token.
    (full,) = engine.generate(requests_for([[7] * MAX_MODEL_LEN], sampling))
    assert (full.output_ids, full.logprobs, full.finish_reason, full.policy_version) == ([], [], "length", 0)
    with pytest.raises(ValueError, match=f"request 'p0': a prompt of {MAX_MODEL_LEN + 1} tokens"):
        engine.generate(requests_for([[7] * (MAX_MODEL_LEN + 1)], sampling))


def test_a_stop_token_id_ends_a_sample_and_stays_in_it(engine: Engine, model_a: Model) -> None:
    prompt = next(p for p in PROMPTS if model_a.greedy(p, 24)[-1] != EOS_ID)
    whole = model_a.greedy(prompt, 24)
    stop = whole[10]
    sampling = replace(GREEDY, stop_token_ids=(stop, 511))
    (output,) = engine.generate(requests_for([prompt], sampling))
    assert output.output_ids == whole[: whole.index(stop) + 1]
    assert output.finish_reason == "stop"
    with pytest.raises(ValueError, match="ignore_eos=true ignores stop_token_ids"):
        engine.generate(requests_for([prompt], replace(sampling, ignore_eos=True)))


def test_a_stop_string_ends_a_sample_over_token_borders(engine: Engine, model_a: Model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_a.path)
    prompt = next(p for p in PROMPTS if model_a.greedy(p, 24)[-1] != EOS_ID)
    whole = model_a.greedy(prompt, 24)
    text = tokenizer.decode(whole[4:6])
    end = next(end for end in range(1, 25) if text in tokenizer.decode(whole[:end]))
    (output,) = engine.generate(requests_for([prompt], replace(GREEDY, stop=("no such text", text))))
    assert (output.output_ids, output.finish_reason) == (whole[:end], "stop")


def test_a_refused_request_shows_the_servers_words(engine: Engine) -> None:
    with pytest.raises(RolloutError, match=r"refused request 'p0': .*top_p"):
        engine.generate(requests_for([[5, 6]], SamplingParams(max_new_tokens=4, top_p=1.5)))


@pytest.mark.shows("sync", "serve", family="qwen3", server="shared_engine")
def test_a_weight_update_session_puts_exactly_the_new_model_into_the_server(
    engine: Engine, model_a: Model, model_b: Model
) -> None:
    config = model_b.hf.config.to_dict()
    expected_b = expected_checksums(model_b.weights(), config, 1, engine.kind)
    assert checksum_differences(expected_b, engine.client.checksums())  # model A is in the server

    engine.load(model_b.weights(), policy_version=7)

    assert checksum_differences(expected_b, engine.client.checksums()) == []
    outputs = engine.generate(requests_for(PROMPTS, GREEDY))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.output_ids == model_b.greedy(prompt, GREEDY.max_new_tokens) != model_a.greedy(prompt, 24)
        assert_logprobs_match(model_b, prompt, output, temperature=1.0)
        assert output.policy_version == 7


def test_one_changed_value_shows_in_the_checksums(engine: Engine, model_a: Model) -> None:
    changed = [(name, tensor.clone()) for name, tensor in model_a.weights()]
    names = [name for name, _ in changed]
    place = names.index("model.layers.1.self_attn.v_proj.weight")
    changed[place][1][3, 5] += 1e-6
    engine.load(changed, policy_version=3)
    expected = expected_checksums(model_a.weights(), model_a.hf.config.to_dict(), 1, engine.kind)
    (difference,) = checksum_differences(expected, engine.client.checksums())
    assert "layers.1.self_attn" in difference


def test_the_policy_version_of_a_sample_is_set_without_an_update(engine: Engine) -> None:
    assert engine.generate(requests_for([[5, 6]], GREEDY))[0].policy_version == 0
    engine.client.set_policy_version(41)
    assert engine.generate(requests_for([[5, 6]], GREEDY))[0].policy_version == 41


def test_an_update_outside_of_a_session_is_refused_and_changes_nothing(
    engine: Engine, model_a: Model, model_b: Model
) -> None:
    with pytest.raises(RolloutError, match="must run between begin_weight_update"):
        engine.client.update_weights([serialize_bucket(model_b.weights(), engine.kind)])
    expected = expected_checksums(model_a.weights(), model_a.hf.config.to_dict(), 1, engine.kind)
    assert checksum_differences(expected, engine.client.checksums()) == []


def test_a_second_session_is_refused(engine: Engine) -> None:
    engine.client.begin_weight_update()
    try:
        with pytest.raises(RolloutError, match="already open"):
            RolloutClient(
                engine.client.url, engine.kind, key=engine.server.key, max_model_len=MAX_MODEL_LEN
            ).begin_weight_update()
    finally:
        engine.client.end_weight_update(0)


def test_release_and_resume_keep_their_order(engine: Engine, model_a: Model) -> None:
    engine.client.release(["kv_cache"])
    engine.client.release(["weights"])
    engine.client.resume(["weights"])
    engine.load(model_a.weights(), policy_version=0)
    engine.client.resume(["kv_cache"])
    (output,) = engine.generate(requests_for(PROMPTS[:1], GREEDY))
    assert output.output_ids == model_a.greedy(PROMPTS[0], 24)


def test_pause_ends_running_samples_and_holds_new_ones(engine: Engine, model_a: Model) -> None:
    requests = requests_for([[5]] * 8, LONG, n=2)

    async def scenario() -> list[GenerateOutput]:
        running = asyncio.create_task(_all(engine.client, requests))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.client.pause)
        try:
            held = asyncio.create_task(_all(engine.client, requests_for([[5]], GREEDY)))
            done, _ = await asyncio.wait([held], timeout=1.0)
            assert not done
        finally:
            await asyncio.to_thread(engine.client.continue_generation)
        assert (await held)[0].finish_reason in ("stop", "length")
        # A request that reached the server after the pause ran to its end now.
        return await running

    outputs = asyncio.run(scenario())
    assert sorted(output.key for output in outputs) == sorted(key for r in requests for key in r.sample_keys())
    for output in outputs:
        assert output.finish_reason in ("abort", "length")
        assert len(output.output_ids) == len(output.logprobs) == len(output.token_versions()) <= 90
        assert_logprobs_match(model_a, [5], output, LONG.temperature)


def test_an_interrupted_sample_goes_on_under_new_weights_with_their_version(
    engine: Engine, model_a: Model, model_b: Model
) -> None:
    requests = requests_for(PROMPTS, replace(LONG, max_new_tokens=40), n=2)
    # A busy machine may let all of them end before the stop, or none begin.
    for num_tokens in (8, 4, 16, 2, 24, 6, 12):
        stopped = _stop_early(engine, requests, num_tokens)
        assert [o.key for o in stopped] == [key for r in requests for key in r.sample_keys()]
        unfinished = [o for o in stopped if not o.finished]
        if any(0 < len(o.output_ids) < 40 for o in unfinished):
            break
    else:
        pytest.fail("no sample was ever stopped between its first token and its last")

    engine.load(model_b.weights(), policy_version=7)
    rest = unfinished_requests(requests, stopped)
    continued = asyncio.run(generate_samples([engine.client], rest))

    assert sorted(o.key for o in continued) == sorted(o.key for o in unfinished)
    before = {o.key: o for o in unfinished}
    for output in continued:
        old, prompt = before[output.key], PROMPTS[int(str(output.request_id)[1:])]
        kept = len(old.output_ids)
        assert output.output_ids[:kept] == old.output_ids
        assert output.logprobs[:kept] == old.logprobs
        assert (len(output.output_ids), output.finish_reason) == (40, "length")
        assert output.token_versions() == [0] * kept + [7] * (40 - kept)
        expected = model_b.logprobs(prompt, output.output_ids, LONG.temperature)[kept:]
        torch.testing.assert_close(torch.tensor(output.logprobs[kept:]), expected, atol=1e-4, rtol=0)


def test_any_number_of_interruptions_keeps_the_model_length_and_every_sample(engine: Engine) -> None:
    # A stop may come when all is done, where the engine is fast and this process waits for a core.
    assert any(_num_interruptions_until_all_is_done(engine) > 0 for _ in range(10))


def _num_interruptions_until_all_is_done(engine: Engine) -> int:
    prompts = [[7 + i % 400 for i in range(length)] for length in (1, MAX_MODEL_LEN - 7, MAX_MODEL_LEN)]
    requests = requests_for(prompts, replace(LONG, max_new_tokens=1000), n=2)
    finished: dict[object, GenerateOutput] = {}
    left, num_interruptions = requests, 0
    while True:
        # The longer it takes the more it may do: it ends on the slowest machine.
        outputs = _stop_early(engine, left, num_tokens=4 + num_interruptions)
        assert [o.key for o in outputs] == [key for r in left for key in r.sample_keys()]
        for output in outputs:
            prompt = prompts[int(str(output.request_id)[1:])]
            assert len(prompt) + len(output.output_ids) <= MAX_MODEL_LEN
            if output.finished:
                assert output.key not in finished
                assert len(prompt) + len(output.output_ids) == MAX_MODEL_LEN
                finished[output.key] = output
        left = unfinished_requests(left, outputs)
        if not left:
            break
        num_interruptions += 1
    assert len(finished) == 6
    return num_interruptions


def test_an_abort_by_somebody_else_is_continued(engine: Engine, model_a: Model) -> None:
    requests = requests_for(PROMPTS, replace(GREEDY, max_new_tokens=60, ignore_eos=True), n=2)

    async def scenario() -> list[GenerateOutput]:
        running = asyncio.create_task(generate_samples([engine.client], requests))
        for _ in range(3):
            await asyncio.sleep(0.02)
            await engine_like(engine).abort_all()
        return await running

    outputs = asyncio.run(scenario())
    assert [o.key for o in outputs] == [key for r in requests for key in r.sample_keys()]
    for output in outputs:
        prompt = PROMPTS[int(str(output.request_id)[1:])]
        assert (len(output.output_ids), output.finish_reason) == (60, "length")
        assert_logprobs_match(model_a, prompt, output, 1.0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_sample_comes_when_it_is_finished_and_the_others_of_its_prompt_run_on(engine: Engine, begun: bool) -> None:
    """An abort that follows the first sample still finds others running. begun: samples that go on."""
    # One token of 64 ends a sample: the first of 16 after a few, and some of them after 90.
    sampling = SamplingParams(max_new_tokens=90, stop_token_ids=tuple(range(0, 512, 64)))
    (request,) = requests_for([PROMPTS[0]], sampling, n=16)
    if begun:
        progress = tuple(GenerateOutput(*key, [9], [-1.0], "abort", 0) for key in request.sample_keys())
        request = replace(request, progress=progress)

    async def scenario() -> list[GenerateOutput]:
        outputs = []
        async for output in engine.client.generate(request):
            if not outputs:
                await engine_like(engine).abort_all()
            outputs.append(output)
        return outputs

    # On a loaded machine the abort may come when all have ended.
    for _ in range(5):
        outputs = asyncio.run(scenario())
        assert sorted(output.key for output in outputs) == request.sample_keys()
        assert outputs[0].finish_reason == "stop"
        if any(output.finish_reason == "abort" for output in outputs):
            return
    pytest.fail("no sample was still running when the first had come")


def test_a_call_that_ends_leaves_the_connections_of_another_alone(engine: Engine) -> None:
    async def scenario() -> list[list[GenerateOutput]]:
        first = asyncio.create_task(_all(engine.client, requests_for([[5]], ONE_TOKEN)))
        await asyncio.sleep(0)
        second = asyncio.create_task(_all(engine.client, requests_for([[5]], LONG)))
        return [await first, await second]

    (short,), (long,) = asyncio.run(scenario())
    assert (len(short.output_ids), len(long.output_ids)) == (1, 90)


def test_shared_memory_does_not_pile_up(engine: Engine, model_b: Model) -> None:
    for policy_version in (1, 2):
        engine.load(model_b.weights(), policy_version)
        # The server holds the last bucket of three until it gets the next one.
        assert len([name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]) <= 1


async def _all(client: RolloutClient, requests: Sequence[GenerateRequest]) -> list[GenerateOutput]:
    async def of(request: GenerateRequest) -> list[GenerateOutput]:
        return [output async for output in client.generate(request)]

    return [output for outputs in await asyncio.gather(*map(of, requests)) for output in outputs]


def engine_like(engine: Engine) -> RolloutClient:
    """Another caller of the same server."""
    return client_like(engine, RolloutClient)


def _stop_early(engine: Engine, requests: list[GenerateRequest], num_tokens: int) -> list[GenerateOutput]:
    """Generation that is stopped when a probe of `num_tokens` tokens beside it is done."""
    seen: list[bool] = []

    async def scenario() -> list[GenerateOutput]:
        probe = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        generation = asyncio.create_task(generate_samples([engine.client], requests, stop_when=lambda: bool(seen)))
        await _all(engine_like(engine), [GenerateRequest("probe", [5], 1, probe, [0])])
        seen.append(True)
        return await generation

    return asyncio.run(scenario())


class ForgetfulClient(RolloutClient):
    """Loses the last sample of every call."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        outputs = [output async for output in super().generate(request)]
        for output in outputs[:-1]:
            yield output


class StutteringClient(RolloutClient):
    """Gives the first sample of every call twice."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        outputs = [output async for output in super().generate(request)]
        for output in outputs[:1] + outputs:
            yield output


def client_like(engine: Engine, client_type: type[RolloutClient], max_concurrency: int = 6) -> RolloutClient:
    return client_type(
        engine.client.url,
        engine.kind,
        key=engine.server.key,
        max_model_len=MAX_MODEL_LEN,
        timeout_s=120.0,
        max_concurrency=max_concurrency,
    )


def test_generate_samples_returns_every_sample_once_and_in_order(engine: Engine) -> None:
    requests = requests_for([[5 + row, 6] for row in range(11)], SamplingParams(max_new_tokens=5), n=3)
    seen: list[tuple[object, int]] = []
    clients = [client_like(engine, RolloutClient), client_like(engine, RolloutClient)]
    outputs = asyncio.run(generate_samples(clients, requests, lambda o: seen.append((o.request_id, o.sample_index))))
    keys = [(output.request_id, output.sample_index) for output in outputs]
    assert keys == [(f"p{row}", i) for row in range(11) for i in range(3)]
    assert sorted(seen, key=str) == sorted(keys, key=str)


def test_generate_samples_notices_a_lost_and_a_doubled_sample(engine: Engine) -> None:
    requests = requests_for([[5, 6], [7, 8]], SamplingParams(max_new_tokens=3), n=2)
    with pytest.raises(RolloutError, match="never came back"):
        asyncio.run(generate_samples([client_like(engine, ForgetfulClient)], requests))
    with pytest.raises(RolloutError, match="came twice"):
        asyncio.run(generate_samples([client_like(engine, StutteringClient)], requests))
    with pytest.raises(ValueError, match="used twice"):
        asyncio.run(generate_samples([engine.client], [requests[0], requests[0]]))


def test_generate_samples_fails_when_a_server_is_gone(engine: Engine) -> None:
    gone = RolloutClient("http://127.0.0.1:9", engine.kind, key="", max_model_len=MAX_MODEL_LEN)
    requests = requests_for([[5, 6], [7, 8]], SamplingParams(max_new_tokens=3))
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9 went away during request 'p1'"):
        asyncio.run(generate_samples([engine.client, gone], requests))


def test_finished_and_unfinished_samples_are_the_submitted_ones(engine: Engine) -> None:
    """The rest is stopped when four samples are finished."""
    short = [GenerateRequest(f"s{row}", [5 + row], 2, SamplingParams(4), [row, 100 + row]) for row in range(4)]
    long = [GenerateRequest(f"l{row}", [50 + row], 2, LONG, [row, 100 + row]) for row in range(12)]
    requests = [*short, *long]
    came: list[GenerateOutput] = []

    outputs = asyncio.run(
        generate_samples(
            [client_like(engine, RolloutClient)],
            requests,
            came.append,
            stop_when=lambda: sum(output.finished for output in came) >= 4,
        )
    )

    seen, keys = [output.key for output in came], [output.key for output in outputs]
    assert keys == [key for request in requests for key in request.sample_keys()]
    assert sorted(seen, key=str) == sorted(keys, key=str)
    unfinished = [output for output in outputs if output.finish_reason == "abort"]
    finished = [output for output in outputs if output.finished]
    assert len(finished) + len(unfinished) == len(outputs)
    assert len(finished) >= 4
    assert len(unfinished) > 0
    # Nothing is left running, and the server takes requests.
    assert {o.key for o in asyncio.run(generate_samples([engine.client], unfinished_requests(requests, outputs)[:1]))}


def test_samples_of_a_prompt_share_a_server_and_the_load_is_even(engine: Engine) -> None:
    class Counting(RolloutClient):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
            taken[self].append((request.input_ids[0], request.n))
            async for output in super().generate(request):
                yield output

    clients = [client_like(engine, Counting, max_concurrency=64) for _ in range(3)]
    taken: dict[RolloutClient, list[tuple[int, int]]] = {client: [] for client in clients}
    prompts = [[5 + row % 6] for row in range(12)]  # every prompt twice
    asyncio.run(generate_samples(clients, requests_for(prompts, SamplingParams(4), n=2)))
    assert [sorted(taken[client]) for client in clients] == [
        [(first, 2)] * 2 + [(first + 3, 2)] * 2 for first in (5, 6, 7)
    ]


# --- who may ask ---

PROTECTED = [
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("POST", "/begin_weight_update"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/update_weights_from_distributed"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/end_weight_update"),
    ("POST", "/update_weight_version"),
    ("POST", "/weights_checker"),
    ("POST", "/flush_cache"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
]


def status_of(url: str, method: str, path: str, headers: dict[str, str]) -> int:
    request = urllib.request.Request(
        url + path,
        method=method,
        data=b"{}" if method == "POST" else None,
        headers={"Content-Type": "application/json"} | headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_stranger_is_refused(engine: Engine) -> None:
    """Without the key, and with another: everywhere but at /health, and nothing has changed."""
    url, key = engine.server.url, engine.server.key
    before = engine.client.checksums()
    for headers in ({}, authorization("another"), {"Authorization": key}, authorization("")):
        statuses = {path: status_of(url, method, path, headers) for method, path in PROTECTED}
        assert statuses == dict.fromkeys(statuses, 401)
        assert status_of(url, "GET", "/health", headers) == 200
    assert engine.client.checksums() == before
    assert engine.generate([GenerateRequest("own", [5], 1, ONE_TOKEN, [0])])[0].finished


def test_the_key_is_written_nowhere(engine: Engine) -> None:
    """Not on the command line of any process of the server, which everybody may read, and not in its log."""
    assert engine.server._supervisor is not None
    pids = [engine.server._supervisor.pid, *descendants(engine.server._supervisor.pid)]
    commands = []
    for pid in pids:
        # One may have ended since.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode())
    assert any("--port" in command for command in commands)
    for text in (*commands, engine.server.log_path.read_text(), " ".join(engine.server.command)):
        assert engine.server.key not in text
