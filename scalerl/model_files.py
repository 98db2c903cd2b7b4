"""Which files of a Hugging Face model directory are weights, and which stand beside them."""

from __future__ import annotations

from pathlib import Path

# Suffixes of the files that are not weights: configuration, tokenizer, chat template, code.
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
# Beginnings of the names of texts, which the licence of a model may ask to be passed on; their suffixes.
_TEXTS = ("README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TEXT_SUFFIXES = ("", ".md", ".txt", ".rst")
# The directory where transformers looks for chat templates beside the default one.
_CHAT_TEMPLATES = "additional_chat_templates"
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
