"""Tools that the policy calls, and interactions that answer it, with the signatures of verl's classes.

A YAML file lists them, as verl's (`load_tools`, `load_interactions`). Classes of the user run as they are: where verl
is not installed, the names that they import from it are those of this module. Two tools are here.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import sqlite3
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from scalerl.base.user_code import UserCodeError, cause_of, import_file
from scalerl.rewards import gsm8k
from scalerl.rewards.sandbox import SandboxLimits, run_python

# Of scalerl's own classes in such a file.
OWN = __name__


class OpenAIFunctionSchema(BaseModel):
    """The function of a tool, as OpenAI's API describes it.  parameters: their JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}


class OpenAIFunctionToolSchema(BaseModel):
    """A tool, as OpenAI's API describes it."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers; text alone."""

    text: str | None = None
    image: None = None
    video: None = None


class BaseTool:
    """A tool: a new instance of its work is created for each call, executed and released.

    config: of the file, for the class.  tool_schema: of the file; None: the class has `get_openai_tool_schema`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        raise ValueError(f"{type(self).__name__} has no schema; give tool_schema in the file")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Makes an instance. kwargs: create_kwargs, of the row's extra_info["tools_kwargs"][name]."""
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the tool. Returns its answer, a reward of the call, and other values."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what `create` made."""


class BaseInteraction:
    """What answers the policy in the user's place. config: of the file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.name = config, str(config.get("name", "interaction_agent"))

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins. kwargs: of the row's extra_info["interaction_kwargs"]."""
        return instance_id or uuid.uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers. Returns whether the conversation ends, the user's next message, a score of the turn, and others."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Frees what `start_interaction` made."""


def _schema(name: str, description: str, parameter: str, meaning: str) -> OpenAIFunctionToolSchema:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    function = OpenAIFunctionSchema(name=name, description=description, parameters=parameters)
    return OpenAIFunctionToolSchema(function=function)


class PythonTool(BaseTool):
    """Runs Python code in the sandbox, and answers what it printed.  config: fields of SandboxLimits."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self.limits = SandboxLimits(**{name: value for name, value in config.items() if name != "type"})

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return _schema("python", "Runs a Python program and returns what it prints.", "code", "The program.")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        result = await asyncio.to_thread(run_python, str(parameters["code"]), "", self.limits)
        error = (result.stderr.strip().splitlines() or [""])[-1]
        failure = "" if result.failure is None else f"\n{result.failure}: {error}".rstrip(": ")
        return ToolResponse(text=(result.stdout.rstrip() + failure).strip()), 0.0, {}


class SearchTool(BaseTool):
    """Finds documents by the words of a question, best first by BM25 (SQLite's FTS5).

    config: documents, the absolute path of a file with a JSON object in each line, whose `text` and `title` are
    searched; topk (3).  The index is written next to the file, once.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        documents = Path(config["documents"]).expanduser()
        if not documents.is_absolute():
            raise ValueError(f"documents is {documents}; give an absolute path, which is the same on every node")
        self.index = _search_index(documents)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return _schema("search", "Searches documents.", "query", "Words to search for.")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        found = await asyncio.to_thread(self.search, str(parameters["query"]))
        texts = [f"{place}. {title}\n{text}" if title else f"{place}. {text}" for place, (title, text) in found]
        return ToolResponse(text="\n".join(texts) or "nothing found"), 0.0, {}

    def search(self, query: str) -> list[tuple[int, tuple[str, str]]]:
        """The documents with any of the words, as (1, 2, ..., (title, text))."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        if not words:
            return []
        # A connection belongs to its thread.
        with sqlite3.connect(f"{self.index.absolute().as_uri()}?mode=ro", uri=True) as database:
            statement = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?"
            return list(enumerate(database.execute(statement, (words, int(self.config.get("topk", 3)))), 1))


def _search_index(documents: Path) -> Path:
    """The index of a file of documents, which is written whole or not at all, again when the file is newer."""
    index = documents.with_name(f"{documents.name}.fts5")
    if index.exists() and index.stat().st_mtime_ns >= documents.stat().st_mtime_ns:
        return index
    descriptor, name = tempfile.mkstemp(dir=documents.parent, prefix=f"{index.name}.tmp-")
    os.close(descriptor)
    try:
        with documents.open(encoding="utf-8") as lines, sqlite3.connect(name) as database:
            database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
            rows = (json.loads(line) for line in lines if line.strip())
            fields = ((str(row.get("title", "")), str(row["text"])) for row in rows)
            database.executemany("INSERT INTO documents VALUES (?, ?)", fields)
        os.replace(name, index)
    finally:
        Path(name).unlink(missing_ok=True)
    return index


def load_tools(path: str, key: str) -> dict[str, Any]:
    """Name -> tool, of a YAML file: `tools`, a list of class_name, config and tool_schema.

    class_name: `module.Class`, of a file next to the YAML file, of a module that can be imported, or of this one.
    Raises UserCodeError, with file and entry, for what cannot be read or made.
    """
    tools = {}
    for place, entry in enumerate(_entries(path, "tools", key)):
        what = f"{key}={path}: tools[{place}]"
        with _named(what):
            schema = entry.get("tool_schema")
            own = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
            tool = _class(str(entry["class_name"]), Path(path).parent, what)(dict(entry.get("config") or {}), own)
            if tool.name in tools:
                raise UserCodeError(f"{what}: another tool has the name {tool.name!r}; give each its own name")
            tools[tool.name] = tool
    return tools


def load_interactions(path: str, key: str) -> dict[str, Any]:
    """Name -> interaction, of a YAML file: `interaction`, a list of name, class_name and config. Raises as above."""
    interactions = {}
    for place, entry in enumerate(_entries(path, "interaction", key)):
        what = f"{key}={path}: interaction[{place}]"
        with _named(what):
            class_name = str(entry["class_name"])
            name = str(entry.get("name") or class_name.rpartition(".")[2].removesuffix("Interaction").lower())
            if name in interactions:
                raise UserCodeError(f"{what}: another interaction has the name {name!r}; give each its own name")
            made = _class(class_name, Path(path).parent, what)(dict(entry.get("config") or {}) | {"name": name})
            interactions[name] = made
    return interactions


def class_files(path: str) -> list[str]:
    """The files of the user's own classes that a YAML file, which loads, names."""
    file = Path(path).expanduser()
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    entries = [entry for name in ("tools", "interaction") for entry in read.get(name) or ()]
    files = {_own_file(str(entry["class_name"]).rpartition(".")[0], file.parent): None for entry in entries}
    return [str(own) for own in files if own is not None]


def schema_of(tool: Any) -> dict[str, Any]:
    """The function schema of a tool, as chat templates and parsers read it."""
    return tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) | {"type": "function"}


def _entries(path: str, name: str, key: str) -> list[dict[str, Any]]:
    try:
        read = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserCodeError(f"{key}={path} cannot be read: {error}; correct it") from error
    entries = read.get(name) if isinstance(read, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries) or not entries:
        raise UserCodeError(f"{key}={path}: `{name}` is no list of class_name and config; write one")
    return [dict(entry) for entry in entries]


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(f"{what}: {cause_of(error, None)}; correct it") from error


def _class(name: str, directory: Path, what: str) -> Any:
    module, _, cls = name.rpartition(".")
    with _names_of_verl():
        file = _own_file(module, directory)
        found = importlib.import_module(module or OWN) if file is None else import_file(file, what)
    return getattr(found, cls)


def _own_file(module: str, directory: Path) -> Path | None:
    """The file of a module that lies next to a YAML file; None: the module is another one."""
    file = directory / f"{module.replace('.', os.sep)}.py"
    return file if module and file.is_file() else None


@contextmanager
def _names_of_verl() -> Iterator[None]:
    """Lets the block import what classes of tools import from verl, where verl is not installed."""
    if importlib.util.find_spec("verl") is not None:
        yield
        return
    here = vars(sys.modules[__name__])
    reward_score = {"gsm8k": gsm8k}
    names: dict[str, Mapping[str, Any]] = {
        "verl": {},
        "verl.interactions": {},
        "verl.interactions.base": here,
        "verl.tools": {},
        "verl.tools.base_tool": here,
        "verl.tools.schemas": here,
        "verl.utils": {"reward_score": SimpleNamespace(**reward_score)},
        "verl.utils.reward_score": reward_score,
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    }
    for name, values in names.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update({key: value for key, value in values.items() if not key.startswith("_")})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
