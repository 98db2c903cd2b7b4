"""Generation of responses to a file's prompts by rollout servers, which are replaced when they are lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from scalerl.base.process import in_daemon
from scalerl.cluster.pools import ResourcePool, are_here
from scalerl.cluster.processes import Processes, leased
from scalerl.commands.parts import Parts
from scalerl.config import GenerationConfig
from scalerl.data.chat import Conversation
from scalerl.data.problems import DataError, FileProblems
from scalerl.data.prompt_tokens import Tokens, tokenize
from scalerl.data.ragged import truncate
from scalerl.data.row_checks import check_extra_info, check_images, check_messages, check_tools
from scalerl.data.tables import FileTable
from scalerl.data.unknown_text import UnknownRows
from scalerl.rollout.dispatcher import generate_samples, max_in_flight
from scalerl.rollout.prompt_sampling import override_sampling, sample_seed
from scalerl.rollout.servers.client import ClientSettings, Replica
from scalerl.rollout.servers.purpose import GENERATION
from scalerl.rollout.servers.recovery import LostServer, Replacements
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, SamplingParams
from scalerl.rollout.servers.server_set import ServerSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data.pictures import Picture, PictureProcessor, PictureSource

FINISH_REASONS = "finish_reasons"


@dataclass(frozen=True)
class Prompt:
    """A prompt to respond to.  row: its number over all files.  images: those that stand in it."""

    row: int
    input_ids: list[int]
    sampling: SamplingParams
    images: Sequence[PictureSource] = ()


def read_prompts(
    tables: Sequence[FileTable],
    cfg: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: PictureProcessor | None = None,
) -> list[Prompt]:
    """Reads the prompt of every row.  Raises DataError with the problems of the first file that has any.

    processor: of a model that takes images.
    """
    prompts: list[Prompt] = []
    data, sees_images = cfg.data, processor is not None
    for file in tables:
        problems, unknown = FileProblems(file.name), UnknownRows()
        column, tools_key, columns = data.prompt_key, data.tools_key, (data.image_key, data.video_key)
        for chunk in file.chunks([column], problems, optional=["extra_info", tools_key, *columns]):
            checked = [
                (
                    check_messages(values[column], row, column, problems, may_have_parts=sees_images),
                    check_tools(values.get(tools_key), row, tools_key, problems),
                    check_images(values, row, *columns, problems, file.directory, sees_images=sees_images) or [],
                )
                for row, values in chunk
            ]
            for row, values in chunk:
                check_extra_info(values.get("extra_info"), row, "extra_info", problems)
            conversations = [
                Conversation(messages, tools, images) for messages, tools, images in checked if messages is not None
            ]
            if problems:
                # Once there is a problem, rows are only checked.
                continue
            tokenized = tokenize(tokenizer, conversations, data.chat_template_kwargs, processor)
            for (row, values), conversation, tokens in zip(chunk, conversations, tokenized, strict=True):
                images = conversation.images
                input_ids = _input_ids(tokens, row, cfg, problems, can_be_cut=not images)
                unknown.add(row, len(tokens.input_ids), tokens.unknown, tokens.left_out, tokens.special)
                sampling = _sampling(values.get("extra_info"), row, cfg, problems)
                if input_ids is not None and sampling is not None:
                    prompts.append(Prompt(file.first + row, input_ids, sampling, images))
            if problems.full:
                break
        problems.raise_if_any()
        # Nothing is trained on them.
        unknown.report(file.name, column, problems, allow=True)
    return prompts


def _input_ids(
    tokens: Tokens, row: int, cfg: GenerationConfig, problems: FileProblems, *, can_be_cut: bool
) -> list[int] | None:
    column, limit, input_ids = cfg.data.prompt_key, cfg.rollout.prompt_length, tokens.input_ids
    if not tokens.is_usable(row, column, problems, cfg.data.image_key):
        return None
    if len(input_ids) > limit and (cfg.data.truncation == "error" or not can_be_cut):
        problems.add(
            f"a prompt longer than rollout.prompt_length={limit} tokens",
            "raise it, or set data.truncation=left|right|middle" if can_be_cut else "raise it: no image can be cut",
            row=row,
            column=column,
            value=f"{len(input_ids)} tokens",
        )
        return None
    return list(truncate(input_ids.tolist(), limit, cfg.data.truncation))


def _sampling(
    extra_info: dict | None, row: int, cfg: GenerationConfig, problems: FileProblems
) -> SamplingParams | None:
    config = cfg.rollout
    base = SamplingParams(
        config.response_length, config.temperature, config.top_p, config.top_k, ignore_eos=config.ignore_eos
    )
    try:
        return override_sampling(base, extra_info, f"row {row}", max_new_tokens_key="rollout.response_length")
    except ValueError as error:
        problems.add(str(error), "correct it", column="extra_info")
        return None


class GenerationServers:
    """The rollout servers of a generation; they serve the model's files, so a restarted server needs nothing else."""

    def __init__(self, cfg: GenerationConfig, pool: ResourcePool, log_dir: Path) -> None:
        """Starts the servers; `wait_ready` returns when they answer."""
        max_model_len = cfg.rollout.prompt_length + cfg.rollout.response_length
        clients = ClientSettings(
            GENERATION, max_model_len, cfg.rollout.request_timeout_s, max_in_flight(cfg.rollout.max_num_seqs)
        )
        self.servers = ServerSet(
            clients,
            pool,
            cfg.model,
            cfg.rollout,
            gpu_ids=None,
            log_dir=log_dir,
            timeout_s=cfg.trainer.timeout_s,
            owns_devices=True,
            single_node=are_here(pool),
        )
        self.servers.start()
        self.num_resubmitted = 0

    def wait_ready(self) -> None:
        """Waits until all servers answer.  Raises ServerStartError, with the last log lines, if one does not start."""
        self.servers.wait_ready()

    @asynccontextmanager
    async def replaced(self) -> AsyncIterator[Replacements]:
        """Restarts lost servers while the block runs; does not wait for restarts at its end."""
        replacements = Replacements(self.servers.settings, self.servers.replicas)
        restarting = asyncio.create_task(self._replace_lost(replacements))
        try:
            yield replacements
        finally:
            restarting.cancel()

    async def _replace_lost(self, replacements: Replacements) -> None:
        while lost := await replacements.next_lost():
            try:
                successors = await asyncio.wrap_future(in_daemon(partial(self._restart, lost), "restart"))
            except Exception as error:
                # Otherwise those who wait for a successor would wait forever.
                await replacements.give_up(error)
                return
            replacements.put(successors)
            await replacements.in_service(successors)

    def _restart(self, lost: Sequence[LostServer]) -> dict[int, Replica]:
        self.servers.end_lost(lost)
        return self.servers.restart_down()

    def leave(self) -> None:
        """Stops the servers at the end of a lease: they serve this model's files, and are of no use to another run."""
        self.stop()

    def stop(self) -> None:
        """Stops the servers."""
        self.servers.stop()


@contextmanager
def generation_servers(
    cfg: GenerationConfig, device: str, log_dir: Path, processes: Processes | None = None
) -> Iterator[GenerationServers]:
    """Starts servers for the block, and stops them after it; their devices go back to `processes`."""
    trainer = cfg.trainer
    with ExitStack() as stack:
        num_workers = trainer.nnodes * trainer.n_gpus_per_node
        lease = stack.enter_context(leased(processes, num_workers=num_workers, device=device, log_dir=log_dir))
        pool = lease.pool(
            nnodes=trainer.nnodes,
            devices_per_node=trainer.n_gpus_per_node,
            device=device,
            timeout_s=trainer.timeout_s,
        )
        servers = lease.add(GenerationServers(cfg, pool, log_dir))
        servers.wait_ready()
        yield servers


async def generate(
    cfg: GenerationConfig,
    prompts: Sequence[Prompt],
    parts: Parts,
    servers: GenerationServers,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: Callable[[], bool],
    processor: PictureProcessor | None = None,
) -> bool:
    """Generates the parts that are missing; returns False if `stop` ended the generation between two parts."""
    todo = parts.missing()
    num_done = parts.num_batches - len(todo)
    async with servers.replaced() as replacements:
        for batch in todo:
            if stop():
                return False
            began = time.monotonic()
            requests = await asyncio.gather(*(_request(prompts[row], cfg, processor) for row in parts.rows(batch)))
            serving = await replacements.serving()
            clients = [replacements.clients[index] for index in serving]
            outputs = await generate_samples(clients, requests, replacements=replacements)
            servers.num_resubmitted = replacements.num_resubmitted
            parts.write(batch, _columns(outputs, cfg, tokenizer))
            num_done += 1
            num_tokens = sum(len(output.output_ids) for output in outputs)
            print(
                f"batch {num_done}/{parts.num_batches}  rows {parts.rows(batch)[0]} to {parts.rows(batch)[-1]}  "
                f"{num_tokens} tokens  {num_tokens / (time.monotonic() - began):.0f} tok/s",
                flush=True,
            )
    return True


async def _request(prompt: Prompt, cfg: GenerationConfig, processor: PictureProcessor | None) -> GenerateRequest:
    pictures: list[Picture] = []
    if processor is not None and prompt.images:
        pictures = await asyncio.to_thread(lambda: [processor.read(image) for image in prompt.images])
    n, seed = cfg.data.n_samples, cfg.rollout.seed
    seeds = [sample_seed(seed, 0, prompt.row, sample) for sample in range(n)]
    return GenerateRequest(prompt.row, prompt.input_ids, n, prompt.sampling, seeds, pictures=tuple(pictures))


def _columns(
    outputs: Sequence[GenerateOutput], cfg: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, pa.Array]:
    """The columns of a part.  outputs: n of each prompt, in order."""
    n = cfg.data.n_samples
    texts = [str(tokenizer.decode(output.output_ids, skip_special_tokens=True)) for output in outputs]
    reasons = [output.finish_reason for output in outputs]

    def lists(values: list[str]) -> pa.Array:
        return pa.array([values[first : first + n] for first in range(0, len(values), n)], pa.list_(pa.string()))

    return {cfg.data.response_key: lists(texts), FINISH_REASONS: lists(reasons)}


def check_new_columns(tables: Sequence[FileTable], cfg: GenerationConfig) -> None:
    """Raises DataError if the input has a column whose name the output needs."""
    new = {cfg.data.response_key: "rename it, or set data.response_key", FINISH_REASONS: "rename it"}
    problems = [
        f"{file.name}: has a column '{name}' already, which the output adds; {advice}"
        for file in tables
        for name, advice in new.items()
        if name in file.column_names
    ]
    if problems:
        raise DataError(problems)
