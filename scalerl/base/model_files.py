"""Which files of a Hugging Face model directory are weights, and which stand beside them: its chat template is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

# Suffixes of the files that are not weights: configuration, tokenizer, chat template, code.
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
# Beginnings of the names of texts, which the licence of a model may ask to be passed on; their suffixes.
_TEXTS = ("README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TEXT_SUFFIXES = ("", ".md", ".txt", ".rst")
# The directory where transformers looks for chat templates beside the default one.
_CHAT_TEMPLATES = "additional_chat_templates"
# The file with the default one, and the file with an entry that counts where there is no such file.
_CHAT_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
CONFIG_NAME = "config.json"
# The files of a model that are fetched; other formats of the same weights are not.
FETCHED = ["*.safetensors", *(f"*{suffix}" for suffix in _BESIDE_WEIGHTS)]
FETCHED += [f"{name}{suffix}" for name in _TEXTS for suffix in _TEXT_SUFFIXES]


def files_beside_weights(model_dir: str | Path) -> list[Path]:
    """The files of a model that a copy of it with other weights needs: paths within the directory, sorted.

    Not weights and their index, in whatever format, nor what is hidden or in a directory that transformers ignores.
    """
    model_dir = Path(model_dir)
    names = [path.relative_to(model_dir) for path in (*model_dir.iterdir(), *model_dir.glob(f"{_CHAT_TEMPLATES}/*"))]
    return sorted(name for name in names if _is_beside_weights(name) and (model_dir / name).is_file())


def _is_beside_weights(name: Path) -> bool:
    if name.name.startswith(".") or name.name.endswith(".index.json"):
        return False
    if len(name.parts) > 1:
        return name.suffix == ".jinja"
    is_text = name.name.upper().startswith(_TEXTS) and name.suffix.lower() in _TEXT_SUFFIXES
    return is_text or name.suffix in _BESIDE_WEIGHTS


def set_chat_template(model_dir: str | Path, template: str) -> None:
    """Makes a text the chat template of a model directory for every reader, in the place of all that it has.

    The directory is one that nothing reads yet: what is written does not appear at once.
    """
    model_dir = Path(model_dir)
    if (model_dir / _CHAT_TEMPLATES).is_dir():
        # Of several templates transformers takes tool_use for a conversation with tools.
        shutil.rmtree(model_dir / _CHAT_TEMPLATES)
    _write_anew(model_dir / _CHAT_TEMPLATE, template)
    tokenizer_config = model_dir / _TOKENIZER_CONFIG
    if not tokenizer_config.is_file():
        return
    entries = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    if "chat_template" in entries:
        # transformers takes the file before it; other readers know the entry alone.
        entries["chat_template"] = template
        _write_anew(tokenizer_config, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")


def _write_anew(file: Path, text: str) -> None:
    """Writes a file that may be there already, as the copy of one that may not be written to."""
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")
