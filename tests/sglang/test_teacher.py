"""A real SGLang server as the reference model or teacher of a run: its numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.rollout.servers.process import free_port
from scalerl.rollout.servers.reference import ReferenceServer, ReferenceServerError
from tests.sglang.conftest import PROMPTS, Engine, Model

pytestmark = pytest.mark.parametrize("shared_engine", ["sglang"], indirect=True)
ABSOLUTE = 1e-5


def shard_of(rows: list[list[int]]) -> DataProto:
    numbers = torch.arange(len(rows)).numpy()
    return DataProto({"input_ids": Jagged.from_list(rows, torch.int64)}, {"uid": numbers + 7, "sample_index": numbers})


@pytest.fixture
def server(engine: Engine) -> ReferenceServer:
    return ReferenceServer(engine.server.url, engine.server.key, retry_s=0.0)


@pytest.mark.parametrize("top_k", [0, 1, 7])
def test_log_probs_are_those_of_transformers(server: ReferenceServer, model_a: Model, top_k: int) -> None:
    """Twice: the second time the server has the prompts in its cache. One row is the start of another, and one has
    the last word of the vocabulary, which SGLang reports as 0."""
    rows = [*PROMPTS, PROMPTS[2][:4], list(range(1, 60)), [5, 511, 511, 6]]
    for _ in range(2):
        made = server.columns(shard_of(rows), top_k)
        assert set(made.tokens) == {"ref_logprobs"} | ({"teacher_ids", "teacher_logprobs"} if top_k else set())
        for row, ids in enumerate(rows):
            expected_TV = model_a.logits(ids).log_softmax(-1)[:-1]
            logprobs_T = made.tokens["ref_logprobs"][row]
            assert logprobs_T[0] == 0 and len(logprobs_T) == len(ids)
            of_ids = expected_TV.gather(1, torch.tensor(ids)[1:, None])[:, 0]
            torch.testing.assert_close(logprobs_T[1:], of_ids, rtol=0, atol=ABSOLUTE)
            if not top_k:
                continue
            top_ids, top = (made.tokens[name][row] for name in ("teacher_ids", "teacher_logprobs"))
            assert (top_ids.dtype, top.dtype, top.shape) == (torch.int32, torch.float32, (len(ids), top_k))
            assert not top[0].any() and not top_ids[0].any()
            values, words = expected_TV.topk(top_k, -1)
            assert torch.equal(top_ids[1:].long(), words)
            torch.testing.assert_close(top[1:], values, rtol=0, atol=ABSOLUTE)


def test_what_the_start_checks(server: ReferenceServer, model_a: Model, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_a.path)
    assert list(server.violations(tokenizer, top_k=4)) == []
    (violation,) = ReferenceServer(server.url, "another key").violations(tokenizer, 0)
    assert f"actor_rollout_ref.ref.url = {server.url}: " in violation and "status 401" in violation
    assert "another key" not in violation and server.key is not None and server.key not in repr(server)
    # A tokenizer with the same words, two of which have each other's number.
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    one, other = sorted(vocab, key=vocab.__getitem__)[20:22]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content))
    (violation,) = server.violations(AutoTokenizer.from_pretrained(tmp_path), 0)
    assert f"has another tokenizer than the policy: token 20 is {one!r} there and {other!r} here" in violation


def test_errors_name_the_sample(server: ReferenceServer, model_a: Model) -> None:
    with pytest.raises(ReferenceServerError) as error:
        server.columns(shard_of([[1, 2], [3] * 5000]), 0)
    assert f"reference server {server.url}, sample 1 of group 8: status 400: " in str(error.value)
    assert error.value.status == 400
    away = ReferenceServer(f"http://127.0.0.1:{free_port('127.0.0.1')}", retry_s=0.0)
    with pytest.raises(ReferenceServerError, match=r"sample 0 of group 7: no answer .*refused"):
        away.columns(shard_of([[1, 2]]), 0)
    (violation,) = away.violations(AutoTokenizer.from_pretrained(model_a.path), 0)
    assert violation.startswith(f"actor_rollout_ref.ref.url = {away.url}: ") and "start the server, or" in violation
