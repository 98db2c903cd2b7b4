"""Makes the text of docs/from-verl.md: how a user of verl starts, what becomes of each key, and of whole commands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from scalerl.extras.verl.keys.entry import Entry
from scalerl.extras.verl.keys.vocabulary import ENTRIES
from scalerl.extras.verl.translate.report import FATES, Report, report_on

INTRO = """\
# From verl

Keys, parquet columns, metrics and the signature of reward functions have verl's names, and a command of verl is
understood as it is: `scalerl train` takes its arguments. Each key has one of four fates, which the start of a run
lists, all but the first:

| fate | what it means |
|---|---|
| taken over | the key has that name and meaning here |
| renamed | it has another name, unit or spelling here: `from -> to (why)` |
| already so | it asks for what always is so, or says more about something that is off: there is nothing to set |
| refused | it asks for what scalerl does not do. The message says why, and what to set instead |

All that is refused comes in one message, before a device is held. A key that neither scalerl nor verl has gets a
guess only where a key of the same section has nearly its name. Two keys that say the same differently are refused
too. YAML files (`--config-path DIR --config-name NAME`, as `--config-dir`) are read in the same way; the names of
verl's own files (`ppo_megatron_trainer`, ...) stand for its defaults, and are left out, on the command line and in
the `defaults` list of a file of yours.

## A script
```
scalerl translate run_qwen3_8b_megatron.sh
```
prints the command of scalerl and a row for each key. The script is read, not run: assignments, `${NAME:-default}`,
whole-number arithmetic, arrays, `"${ARGS[@]}"`, heredocs, `if [ ... ]` and `case` of known values are followed.
What it cannot know (a command in `$(...)`, a variable of the environment, a sourced file) is listed with its line,
and stays in the command for your shell; a program in a loop or a function is named, and not translated. What a run
would refuse of the translated command (sizes that do not fit each other, a missing key) ends the table. Defaults
of verl that decide what is trained, and are others here, are written out where the script is silent
(`algorithm.adv_estimator=gae`, `trainer.total_epochs=30`,
`actor_rollout_ref.rollout.tensor_model_parallel_size=2`).

## The same name, another meaning
- `trainer.save_freq=-1` saves the last step, too. `trainer.default_local_dir` begins with `outputs/`.
- `algorithm.rollout_correction.*`: bounds of `*_k1` are of the ratio, not of its inverse
([configuration](configuration.md)).
- `actor.clip_ratio` has an effect by itself.
- Turns and tools (`multi_turn`, `agent`, `data.tool_config_path`) are a program's ([extending](extending.md)): without
`actor_rollout_ref.rollout.program.path` they are refused, and a translated command has a place to write it.
- FSDP's keys are understood, but Megatron trains: a model that does not fit one device wants sizes in
`actor.megatron`.

## Fields of Megatron's own configs
`megatron.override_transformer_config.*`, `megatron.override_ddp_config.*` and `optim.override_optimizer_config.*`
go to Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig; `+` before the key makes no
difference. Name and type are checked against Megatron's dataclasses before a device is held, and the values are
saved with the run. Reference, critic and reward model have the actor's, and their own on top. Fields that have a
key here go there; fields that scalerl sets itself are refused, unless the value is the one that it sets: the tables
below name them.
"""
# Keys that were accepted of these commands before keys were translated.
BEFORE = {"grpo8b": 34, "gspo30b": 49, "dsv3": 62, "dapo_npu": 68}
BEFORE_TITLE = "accepted at revision 1a88f90, before keys were translated"
MORE = """\
## Other scripts
What becomes of the arguments of other scripts of verl: of its examples, recipes and end-to-end tests. What is dropped,
and what else a run refuses, is left to edit; it comes in one message.
"""
# Scripts that the vocabulary was measured on before anybody had looked at them, and how many of their keys were
# accepted then.
HELD_OUT = {
    "ppo_qwen1_5_moe": ("examples/ppo_trainer/run_qwen1.5_moe_a2.7b-gsm8k_megatron.sh", 39),
    "ppo_qwen3_8b": ("examples/ppo_trainer/run_qwen3_8b_megatron.sh", 45),
    "grpo_qwen2_7b_lora": ("examples/grpo_trainer/run_qwen2-7b_math_megatron_lora.sh", 42),
    "grpo_qwen2_5_vl_7b": ("examples/grpo_trainer/run_qwen2_5_vl-7b-megatron.sh", 50),
    "grpo_deepseek_v4_flash": ("examples/grpo_trainer/run_deepseek_v4_flash_megatron.sh", 108),
    "dapo_deepseek_v3_671b": ("recipe/dapo/test_dapo_dspk_671b_megatron.sh", 73),
    "dapo_qwen3_8b_fp8": ("recipe/dapo/test_dapo_8b_megatron_fp8train.sh", 76),
    "dapo_qwen3_30b_fp8_e2e": ("verl-recipe: low_precision/run_dapo_qwen3_moe_30b_megatron_fp8e2e.sh", 101),
    "dapo_qwen3_30b_qat": ("verl-recipe: qat/run_qwen3_30b_w4a16_megatron.sh", 105),
    "gkd_qwen3_4b_npu": ("verl-recipe: gkd_ascend/run_4b_megatron.sh", 55),
    "user_grpo_qwen2_5_7b_4gpu": ("a user's: Qwen2.5-7B on four GPUs", 56),
    "user_grpo_qwen3_4b_16k": ("a user's: Qwen3-4B, answers of 16k tokens", 86),
    "user_grpo_moe_52b_pbs": ("a user's: a mixture of experts of 52B, under PBS", 42),
    "user_grpo_qwen3_0_6b_profile": ("a user's: Qwen3-0.6B with profiles, of an older verl", 47),
    "user_grpo_qwen3_1_7b_sglang": ("a user's: Qwen3-1.7B, in a copy of verl with keys of its own", 58),
}
HELD_OUT_INTRO = """\
## Scripts that were held out
The scripts above are also those that the vocabulary was written by. These are not: Megatron scripts of verl's
examples and recipes, and of users, first read at revision 790ffdc, by the vocabulary as it was. {before} of their
{keys} keys were accepted ({share:.1%}), no message guessed another key, and {few} of the {scripts} scripts ran after at
most three edits. Of the keys that were refused half had no reason of their own (the profile of one role in an older
verl, a teacher's server, keys that a user's own copy of verl has), and one had a wrong one (a chat template in a file).
Three of eight ways to start the program were not read (a module by its bare name, `bash -c "..."` and `ssh HOST "..."`,
a recipe's `--config-name`). What was missing in general was added after that; the columns from "taken over" on count
with it.
"""
# Scripts that ran after at most three edits when they were held out.
FEW_EDITS_BEFORE = 10


def page(
    commands: Mapping[str, tuple[str, Sequence[str]]],
    more: Mapping[str, Sequence[str]],
    held_out: Mapping[str, Sequence[str]],
) -> str:
    """Makes the text of docs/from-verl.md.

    commands: name -> (title, arguments) of commands of verl.  more: name -> arguments of those that are only counted;
    a name that begins with sft is of fine-tuning.  held_out: name -> arguments of the scripts of `HELD_OUT`.
    """
    reports = {name: report_on("train", "ppo", list(arguments)) for name, (_, arguments) in commands.items()}
    blocks = [INTRO, "## Whole commands", _counts(commands, reports)]
    for name, (title, _) in commands.items():
        blocks.append(f"### {title}\n```\n{reports[name].shell()}\n```\n{_rows(reports[name])}")
    blocks += [
        MORE,
        _counts_of_more(more),
        _held_out_intro(held_out),
        _counts_of_held_out(held_out),
        "## Keys",
        _key_table(ENTRIES["ppo"]),
    ]
    of_sft = [entry for entry in ENTRIES["sft"] if entry not in ENTRIES["ppo"]]
    blocks += ["## Keys of fine-tuning", "Beside those above that `scalerl sft` has too:", _key_table(of_sft)]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _counts(commands: Mapping[str, tuple[str, Sequence[str]]], reports: Mapping[str, Report]) -> str:
    fates = [fate for fate in FATES if fate != "verl's default"]
    lines = [f"| command | keys | {BEFORE_TITLE} | {' | '.join(fates)} |", f"|{'---|' * (len(fates) + 3)}"]
    for name, (title, arguments) in commands.items():
        counts = Counter(row.fate for row in reports[name].rows)
        cells = [len(arguments), BEFORE[name], *(counts[fate] for fate in fates)]
        lines.append(f"| {title} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _counts_of_more(more: Mapping[str, Sequence[str]]) -> str:
    fates = [fate for fate in FATES if fate != "verl's default"]
    lines = [f"| script | keys | {' | '.join(fates)} | else to edit |", f"|{'---|' * (len(fates) + 3)}"]
    for name, arguments in more.items():
        kind = ("sft", "sft") if name.startswith("sft") else ("train", "ppo")
        cells = [len(arguments), *_fates_and_edits(report_on(*kind, list(arguments)), fates)]
        lines.append(f"| `{name}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _fates_and_edits(report: Report, fates: Sequence[str]) -> list[int]:
    """The number of keys of each fate, and of what else a run refuses."""
    counts = Counter(row.fate for row in report.rows)
    return [*(counts[fate] for fate in fates), len(report.refused)]


def _held_out_intro(held_out: Mapping[str, Sequence[str]]) -> str:
    before, keys = sum(accepted for _, accepted in HELD_OUT.values()), sum(map(len, held_out.values()))
    return HELD_OUT_INTRO.format(
        before=before, keys=f"{keys:,}", share=before / keys, few=FEW_EDITS_BEFORE, scripts=len(HELD_OUT)
    )


def _counts_of_held_out(held_out: Mapping[str, Sequence[str]]) -> str:
    fates = [fate for fate in FATES if fate != "verl's default"]
    lines = [
        f"| script | keys | accepted when held out | {' | '.join(fates)} | else to edit |",
        f"|{'---|' * (len(fates) + 4)}",
    ]
    for name, (script, accepted) in HELD_OUT.items():
        report = report_on("train", "ppo", list(held_out[name]))
        cells = [len(held_out[name]), accepted, *_fates_and_edits(report, fates)]
        lines.append(f"| {script} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _rows(report: Report) -> str:
    lines = ["| of verl | fate | |", "|---|---|---|"]
    for fate in FATES[1:]:
        for row in report.rows:
            if row.fate == fate:
                said = " ".join(f"`{text}`" for text in row.becomes if text != row.written)
                lines.append(f"| `{row.written}` | {fate} | {': '.join(part for part in (said, row.why) if part)} |")
    return "\n".join(line.replace("||", "|") for line in lines)


def _key_table(entries: Sequence[Entry]) -> str:
    lines = [
        "`*` is one part of a key, `**` the rest, `{a, b}` either.",
        "",
        "| key of verl | here | why |",
        "|---|---|---|",
    ]
    for entry in entries:
        cells = (f"`{_readable(entry.pattern)}`", entry.said, entry.why)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _readable(pattern: str) -> str:
    """A pattern as a reader sees it: `(a|b).c` as `{a, b}.c`, with `?` after a group that may be empty."""
    pattern = pattern.replace("()", "")
    while group := re.search(r"\(([^()]*)\)", pattern):
        options = group[1].split("|")
        text = ", ".join(option for option in options if option)
        text = f"<{text}>" if len([option for option in options if option]) > 1 else text
        pattern = pattern[: group.start()] + text + ("?" if "" in options else "") + pattern[group.end() :]
    return pattern.replace("<", "{").replace(">", "}").replace("|", ", ")
