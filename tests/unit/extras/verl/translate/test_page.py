"""docs/from-verl.md is what `scalerl translate` makes of scripts of verl and of its vocabulary.

`python -m tests.unit.extras.verl.translate.test_page` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from scalerl.extras.verl.translate.page import page

ROOT = Path(__file__).parents[5]
PAGE = ROOT / "docs" / "from-verl.md"
COMMANDS = Path(__file__).parents[3] / "config" / "verl_commands"
TITLES = {
    "grpo8b": "GRPO, Qwen3-8B",
    "gspo30b": "GSPO, Qwen3-30B-A3B",
    "dsv3": "GRPO, DeepSeek-V3 671B",
    "dapo_npu": "DAPO, Moonlight-16B-A3B (on NPUs)",
}


def the_page() -> str:
    more, held_out = (
        {path.stem: path.read_text().splitlines() for path in sorted((COMMANDS / folder).glob("*.txt"))}
        for folder in ("more", "held_out")
    )
    whole = {name: (title, (COMMANDS / f"{name}.txt").read_text().splitlines()) for name, title in TITLES.items()}
    return page(whole, more, held_out)


def test_the_page_says_what_the_command_does():
    assert PAGE.read_text(encoding="utf-8") == the_page()


if __name__ == "__main__":
    PAGE.write_text(the_page(), encoding="utf-8")
