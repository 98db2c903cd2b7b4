"""Reads and writes values as a user types them: Hydra and YAML keep of a number or a boolean no more than its value."""

from __future__ import annotations

import re
from typing import Any

import yaml
from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf._utils import get_yaml_loader


def texts_of_override(argument: str) -> Any:
    """The value of a `key=value` that Hydra can parse, with each number and boolean as the text that was written."""
    parser = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(argument))))
    override: Any = _Visitor(create_functions()).visit(parser.override())
    return override.value()


class _Visitor(HydraOverrideVisitor):
    def _createPrimitive(self, ctx: Any) -> Any:
        value = super()._createPrimitive(ctx)
        return ctx.getText().strip() if isinstance(value, bool | int | float) else value


class _Loader(get_yaml_loader()):
    """OmegaConf's loader of YAML, without what makes numbers and booleans of texts."""


for _type in ("bool", "int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_type}", lambda loader, node: loader.construct_scalar(node))


def texts_of_yaml(text: str) -> Any:
    """The content of a YAML file that can be parsed, with each number and boolean as the text that was written."""
    return yaml.load(text, Loader=_Loader)


def as_text(value: Any, texts: Any) -> Any:
    """The value of a key that holds text, or a list or dict of texts, with the characters that were written.

    texts: the same from `texts_of_override` or `texts_of_yaml`.
    """
    if isinstance(value, dict):
        return {name: as_text(value[old], texts[name]) for old, name in zip(value, texts, strict=True)}
    if isinstance(value, list):
        return [as_text(*each) for each in zip(value, texts, strict=True)]
    return texts if isinstance(value, bool | int | float) else value


def misread(value: Any, texts: Any) -> tuple[str, int | float] | None:
    """The first number in a value that YAML reads in base 8 or 60 (0123, 12:30), as written and as read; else None.

    value, texts: as those of `as_text`.
    """
    if isinstance(value, dict | list) and isinstance(texts, dict | list):
        both = [of.values() if isinstance(of, dict) else of for of in (value, texts)]
        return next((found for each in zip(*both, strict=True) if (found := misread(*each)) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(texts, str):
        return None
    is_octal = re.fullmatch(r"[-+]?0[0-7_]+", texts) is not None and int(texts.replace("_", "")) != value
    return (texts, value) if is_octal or ":" in texts else None


def quoted(text: str, quote: Quote = Quote.single) -> str:
    """A text as the value of a `key=value`, whatever characters it has."""
    return QuotedString(text, quote).with_quotes()
