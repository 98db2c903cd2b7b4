"""The `data` sections: files, their columns, and the sizes of what is read from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from scalerl.config.schema.fields import Place, check, key, same_as, times
from scalerl.config.value_checks import FILES, PARQUET, TEXT, all_or_at_least, at_least, one_of, or_null


@dataclass
class FilesConfig:
    """The keys of every `data` section."""

    # Copies of files that are given as URLs, kept from run to run.
    cache_dir: str = key("~/.cache/scalerl/data", TEXT)


@dataclass
class ChatConfig(FilesConfig):
    """The keys that say how messages become text."""

    # Variables of the chat template, for every row: chat_template_kwargs.enable_thinking=false; tools is a list of
    # function schemas.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Column with the function schemas of a row, which may be missing: a list, or JSON text of one. A row without any
    # has chat_template_kwargs.tools.
    tools_key: str = key("tools", TEXT)
    # Column with a list of images, which may be missing; the messages have <image> for each.
    image_key: str = key("images", TEXT)
    # Column with a list of videos, which may be missing. Rows with videos are refused.
    video_key: str = key("videos", TEXT)
    # Smaller images are enlarged to so many pixels; null: the model's own limit (preprocessor_config.json).
    min_pixels: int | None = key(None, or_null(at_least(1)))
    # Larger images are made smaller, to so many pixels; null: the model's own limit.
    max_pixels: int | None = key(None, or_null(at_least(1)))
    # Jinja file with a chat template; null: the one in the model's directory. A run's checkpoints have it, and so the
    # models that are merged from them.
    chat_template_path: str | None = key(None, or_null(TEXT))


@dataclass
class TrainingDataConfig(ChatConfig):
    """The keys that training on prompts and training on conversations have in common."""

    # One path or URL, or a list of them (parquet, json, jsonl).
    train_files: Any = key(MISSING, FILES)
    shuffle: bool = True
    seed: int = key(42, at_least(0))
    # What to do with a prompt over max_prompt_length that was not filtered: refuse it, or cut off its left, right or
    # middle.
    truncation: str = key("error", one_of("error", "left", "right", "middle"))
    # What to do with text that the tokenizer has no token for, or that the chat template leaves out, which the model
    # would not see: refuse the rows, or allow them, with a line that counts.
    unknown_tokens: str = key("error", one_of("error", "allow"))


@dataclass
class CustomClassConfig:
    """A dataset class of the user's own."""

    # Python file with a dataset class of your own; null: RLHFDataset.
    path: str | None = key(None, or_null(TEXT))
    # The class; null: the only one in the file that has __len__ and __getitem__.
    name: str | None = key(None, or_null(TEXT))


@dataclass
class DataConfig(TrainingDataConfig):
    """`data` of `scalerl train`: prompts."""

    # One path or URL, or a list of them (parquet, json, jsonl).
    val_files: Any = key(MISSING, FILES)
    # Column with a list of {"role", "content"}.
    prompt_key: str = key("prompt", TEXT)
    # Column whose value picks the reward rule and groups validation metrics.
    reward_fn_key: str = key("data_source", TEXT)
    # Tokens of a prompt, chat template included.
    max_prompt_length: int = key(512, at_least(1))
    # Tokens of a response.
    max_response_length: int = key(512, at_least(1))
    # Prompts per step.
    train_batch_size: int = key(1024, at_least(1))
    # Prompts whose samples a step begins. More than train_batch_size: generation ends when that many groups are whole,
    # and what is unfinished is dropped or, with rollout.partial_rollout, continued in the next step.
    gen_batch_size: int = key(same_as("data.train_batch_size"), at_least(1))
    # First rows to keep; -1: all.
    train_max_samples: int = key(-1, all_or_at_least(1))
    # First rows to keep; -1: all.
    val_max_samples: int = key(-1, all_or_at_least(1))
    # Drop prompts over max_prompt_length, with a count.
    filter_overlong_prompts: bool = False
    # Processes that tokenize the prompts of a file beyond its first 1024; 1: this process alone.
    filter_overlong_prompts_workers: int = key(1, at_least(1))
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)

    @check("gen_batch_size", "train_batch_size")
    def enough_prompts_begun(self, at: Place) -> Iterator[str]:
        begun, batch = self.gen_batch_size, self.train_batch_size
        if begun < batch:
            yield (
                f"{at('gen_batch_size')} = {begun}: must be at least {at('train_batch_size')} = {batch}; set "
                f"{at('gen_batch_size')}={batch} or more"
            )


@dataclass
class SFTDataConfig(TrainingDataConfig):
    """`data` of `scalerl sft`: conversations."""

    # One path or URL, or a list of them (parquet, json, jsonl); null: nothing is validated.
    val_files: Any = key(None, or_null(FILES))
    # Column with a list of {"role", "content"}; loss on assistant turns.
    messages_key: str = key("messages", TEXT)
    # Conversations per optimizer update.
    train_batch_size: int = key(256, at_least(1))
    # Tokens of one conversation, chat template included.
    max_length: int = key(1024, at_least(1))
    # What to do with a conversation over max_length: refuse it, or cut off its left or right.
    truncation: str = key(TrainingDataConfig.truncation, one_of("error", "left", "right"))
    # Tokens of a packed micro-batch, over all devices that share its conversations.
    max_tokens_per_micro_batch: int = key(times(16384, "megatron.context_parallel_size"), at_least(1))


@dataclass
class ResponseFilesConfig(FilesConfig):
    """The keys that `scalerl generate` and `scalerl eval` have in common: prompts and, in another column, responses."""

    # One path or URL, or a list of them (parquet, json, jsonl).
    path: Any = key(MISSING, FILES)
    # Column with a list of {"role", "content"}; `scalerl eval` does without it.
    prompt_key: str = key(DataConfig.prompt_key, TEXT)
    # Column with a list of responses for each prompt, which `scalerl generate` adds; `scalerl eval` takes one response,
    # too.
    response_key: str = key("responses", TEXT)


@dataclass
class GenerationDataConfig(ResponseFilesConfig, ChatConfig):
    """`data` of `scalerl generate`."""

    # Prompts whose responses are written at a time: what a run that was killed has to do again, at most.
    batch_size: int = key(128, at_least(1))
    # Responses for each prompt.
    n_samples: int = key(1, at_least(1))
    # First rows to keep; -1: all.
    max_samples: int = key(-1, all_or_at_least(1))
    # What to do with a prompt over rollout.prompt_length: refuse it, or cut off its left, right or middle.
    truncation: str = key(DataConfig.truncation, one_of("error", "left", "right", "middle"))
    # Parquet file with the columns of the input and the responses. Until it is complete,
    # OUTPUT_PATH.parts has the responses that are done.
    output_path: str = key(MISSING, PARQUET)

    @check("prompt_key", "response_key")
    def responses_in_a_new_column(self, at: Place) -> Iterator[str]:
        if self.response_key == self.prompt_key:
            yield (
                f"{at('response_key')} = {self.response_key}: is {at('prompt_key')} too, and both columns are written; "
                f"set {at('response_key')}=responses"
            )


@dataclass
class EvalDataConfig(ResponseFilesConfig):
    """`data` of `scalerl eval`."""

    # Column whose value picks the reward rule and groups the metrics.
    data_source_key: str = key("data_source", TEXT)
    # Column with {"ground_truth": ...}.
    reward_model_key: str = key("reward_model", TEXT)
    # Parquet file with the columns of the input and the scores; null: none is written.
    output_path: str | None = key(None, or_null(PARQUET))
