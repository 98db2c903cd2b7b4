"""Samples as text: prompt and response apart, with the special tokens or without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.rollout.sampling.dump import texts_of
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def samples() -> tuple[DataProto, dict[int, Any]]:
    """Two samples that begin and end with special tokens, whose prompts are of rows 7 and 3 of the data set."""
    begin, end = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    prompts, responses = ("1+1=", "ä?"), ("2", "é")
    prompt_ids = [[begin, *TOKENIZER.encode(text)] for text in prompts]
    ids = [[*prompt, *TOKENIZER.encode(text), end] for prompt, text in zip(prompt_ids, responses, strict=True)]
    columns = {"prompt_uid": np.array([7, 3]), "prompt_length": np.array([len(prompt) for prompt in prompt_ids])}
    mask = [[i >= length for i in range(len(row))] for row, length in zip(ids, columns["prompt_length"], strict=True)]
    rows = {3: SimpleNamespace(ground_truth={"x": "é"}), 7: SimpleNamespace(ground_truth="2")}
    tokens = {"input_ids": Jagged.from_list(ids, torch.int64), "response_mask": Jagged.from_list(mask, torch.bool)}
    return DataProto(tokens=tokens, samples=columns), rows


@pytest.mark.parametrize("with_special_tokens", [False, True])
def test_special_tokens_are_shown_only_where_they_are_asked_for(with_special_tokens: bool) -> None:
    begin, end = (TOKENIZER.bos_token, TOKENIZER.eos_token) if with_special_tokens else ("", "")
    assert texts_of(TOKENIZER, *samples(), with_special_tokens) == [
        (f"{begin}1+1=", f"2{end}", "2"),
        (f"{begin}ä?", f"é{end}", '{"x": "é"}'),
    ]


def test_a_response_that_the_policy_has_not_sampled_alone_is_a_conversation() -> None:
    batch, rows = samples()
    mask, start = batch.tokens["response_mask"].values, batch.samples["prompt_length"][0]
    mask[start] = False
    assert [text for _, text, _ in texts_of(TOKENIZER, batch, rows, True)] == [
        "[assistant, masked]\n2\n[assistant]\n<|im_end|>",
        "é<|im_end|>",
    ]
