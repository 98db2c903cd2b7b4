"""docs/developing.md names files that are there, and what its table says of a new part is enough to add one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl.algorithms import get_adv_estimator, get_policy_loss
from scalerl.base.user_code import forget_files, import_file, import_files
from scalerl.cluster.dispatch import registration_of
from scalerl.config import ConfigError, compose
from scalerl.config.help import help_text
from scalerl.config.schema import SCHEMAS, CustomRewardFunctionConfig, RewardModelConfig
from scalerl.models import ModelShape, family_of
from scalerl.models.registry import FAMILIES
from scalerl.rewards import default_compute_score
from scalerl.rewards.manager import ScoreRequest, build_reward_manager
from scalerl.rollout.servers.replica import Replica
from scalerl.rollout.sync.session import Feed, SyncSession
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import merge_metrics
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
# Of a row with NAME in it: a file of that kind.
EXAMPLES = {"scalerl/models/": "qwen2", "engines/": "embedded", "transports/": "disk", "scalerl/tracking/": "mlflow"}
PARTS = (
    "dense model family", "family with experts", "rollout engine", "way that weights take", "advantage estimator",
    "policy loss", "reward manager", "call on the trainer's ranks", "metric", "tracker", "key of the configuration",
    "command",
)  # fmt: skip
NEW_PARTS = """
import json
from pathlib import Path

from scalerl.algorithms import register_adv_est, register_policy_loss, register_token_adv_est
from scalerl.cluster.dispatch import Dispatch, register
from scalerl.tracking.metrics import Metric
from scalerl.rewards import register_reward, register_reward_manager
from scalerl.rewards.manager import RewardManager, ScoreResult
from scalerl.tracking import register_backend


@register_adv_est("page_estimator")
def estimator(scores_S, uids_S, config):
    return scores_S - scores_S.mean()


@register_token_adv_est("page_token_estimator")
def token_estimator(rewards_T, response_mask_T, cu_seqlens, config):
    returns_T = (rewards_T * response_mask_T).flip(0).cumsum(0).flip(0)
    return returns_T - returns_T.mean(), returns_T


@register_policy_loss("page_loss")
def loss(logprobs_T, old_logprobs_T, advantages_T, config):
    return -(logprobs_T * advantages_T), {}


@register_reward("page/data")
def rule(solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


@register_reward_manager("page_manager")
class Manager(RewardManager):
    def __init__(self, function, config):
        self.function = function

    async def score(self, request):
        value = self.function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
        return ScoreResult(2 * value)


@register_backend("page_tracker")
class Tracker:
    def __init__(self, info):
        self.path = Path(info.run_dir) / "page.jsonl"

    def log(self, data, step, time_s):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **data}) + "\\n")

    def log_artifact(self, path):
        pass

    def log_table(self, name, columns, rows, step):
        pass

    def finish(self, status):
        self.log({"finished": status}, -1, 0.0)


@register(Dispatch.ONE_TO_ALL)
def count_parameters(worker):
    return {"page/parameters": Metric(float(worker.num_parameters), "sum")}
"""
NEW_KEY = """
from dataclasses import dataclass, field

from scalerl.config.schema import EvalConfig, EvalTrainerConfig
from scalerl.config.schema.fields import key
from scalerl.config.value_checks import at_least


@dataclass
class PageTrainerConfig(EvalTrainerConfig):
    # Pages to show.
    num_pages: int = key(3, at_least(1))


@dataclass
class PageConfig(EvalConfig):
    trainer: PageTrainerConfig = field(default_factory=PageTrainerConfig)
"""
NEW_FAMILY = """
from scalerl.models.table import decoder_family

FAMILY = decoder_family("page_family", qkv_bias=True)
"""
NEW_TRANSPORT = """
class Transport:
    has_session = True

    def __init__(self, export):
        self.export, self.sent = export, []

    def send(self, session):
        leads = {feed.lead for feed in session.feeds}
        for named in self.export(session.bucket_bytes, lambda number: leads):
            for feed in session.led_feeds:
                session.call(feed, "bucket", lambda client: client.load(named))
            session.hash(named)
        return 0, 0

    def forget(self, index):
        pass
"""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    forget_files()


def named_files() -> list[str]:
    return sorted(set(re.findall(r"`([A-Za-z_][\w./]*\.(?:py|md)|[A-Za-z_][\w]*/[\w/]*)`", PAGE)))


@pytest.mark.parametrize("named", named_files())
def test_a_file_that_is_named_is_there(named: str) -> None:
    for folder, example in EXAMPLES.items():
        if folder in named:
            named = named.replace("NAME", example)
    assert any((ROOT / top / named).exists() for top in ("", "scalerl")), f"docs/developing.md names {named}"


def test_every_kind_of_part_has_a_row() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert [part for part in PARTS if not any(row.startswith(part) for row in rows)] == []


def test_one_of_each_that_a_file_registers(tmp_path: Path) -> None:
    file = tmp_path / "parts_of_the_page.py"
    file.write_text(NEW_PARTS)
    import_files([str(file)])
    scores_S = get_adv_estimator("page_estimator").function(torch.tensor([1.0, 3.0]), None, None)
    assert scores_S.tolist() == [-1.0, 1.0]
    token_estimator = get_adv_estimator("page_token_estimator")
    assert token_estimator.per_token
    advantages_T, returns_T = token_estimator(torch.tensor([0.0, 2.0]), torch.ones(2), torch.tensor([0, 2]), None)
    assert returns_T.tolist() == [2.0, 2.0] and advantages_T.tolist() == [0.0, 0.0]
    assert get_policy_loss("page_loss")(torch.ones(1), None, torch.ones(1), None)[0].tolist() == [-1.0]
    assert default_compute_score("page/data", "4", "4") == 1.0
    manager = build_reward_manager(RewardModelConfig(reward_manager="page_manager"), CustomRewardFunctionConfig())
    result = asyncio.run(manager.scored(ScoreRequest("row 0", "page/data", "2 + 2", "4", "4")))
    assert result.score == 2.0
    tracking = Tracking("project", "experiment", "page_tracker", run_dir=tmp_path / "run")
    tracking.log({"page/number": 7.0}, step=1)
    tracking.finish()
    records = [json.loads(line) for line in (tmp_path / "run" / "page.jsonl").read_text().splitlines()]
    assert records == [{"step": 1, "page/number": 7.0}, {"step": -1, "finished": "FINISHED"}]
    call = import_file(file, "test").count_parameters
    assert registration_of(call).execute_mode.name == "ALL"
    merged = merge_metrics(call(SimpleNamespace(num_parameters=number)) for number in (2, 3))
    assert merged["page/parameters"].value == 5.0


def test_a_key_is_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key_of_the_page.py"
    file.write_text(NEW_KEY)
    monkeypatch.setitem(SCHEMAS, "eval", import_file(file, "test").PageConfig)
    given = ["data.path=[rows.parquet]", "trainer.num_pages=5"]
    cfg: Any = compose("eval", given)
    assert cfg.trainer.num_pages == 5
    assert "trainer.num_pages (int: at least 1) = 3\n      Pages to show." in help_text("eval")
    for wrong, said in (("num_pages=0", "trainer.num_pages = 0"), ("num_page=2", "did you mean trainer.num_pages?")):
        with pytest.raises(ConfigError, match=re.escape(said)):
            compose("eval", [*given, f"trainer.{wrong}"])


def test_a_family_is_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "family_of_the_page.py"
    file.write_text(NEW_FAMILY)
    family = import_file(file, "test").FAMILY
    model = make_tiny_model(tmp_path / "model", "qwen2")
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "page_family"}))
    with pytest.raises(ValueError, match="model_type 'page_family' is not supported"):
        ModelShape.from_hf(model)
    monkeypatch.setitem(FAMILIES, family.model_type, family)
    shape = ModelShape.from_hf(model)
    names = {name for param in family_of(shape).params(shape) for name in param.hf_shapes(shape)}
    assert "model.layers.1.self_attn.q_proj.bias" in names


def test_a_transport_is_one_class(tmp_path: Path) -> None:
    """It sends what a sync hands it, to the servers that this rank leads, in the order that all transports obey."""
    file = tmp_path / "transport_of_the_page.py"
    file.write_text(NEW_TRANSPORT)
    buckets = [[("a", torch.ones(2))], [("b", torch.zeros(3))]]
    transport = import_file(file, "test").Transport(lambda bucket_bytes, needed: iter(buckets))
    loaded: list[str] = []
    client: Any = SimpleNamespace(load=lambda named: loaded.extend(name for name, _ in named))
    feed = Feed(0, Replica("http://server", "embedded", 1, "key"), (0,))
    session = SyncSession([feed], {"http://server": client}, {}, rank=0, policy_version=1, bucket_bytes=1, verify=False)
    session.call(feed, "begin", lambda client: None)
    transport.send(session)
    session.call(feed, "end", lambda client: None)
    assert loaded == ["a", "b"] and session.failed == {}
