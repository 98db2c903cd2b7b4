"""The program `python -m scalerl.rollout.servers.sglang.launch`: SGLang's server with the key of the environment.

Its arguments are those of `sglang.launch_server`, where a key would be on the command line, which everybody can read.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scalerl.base.lean_imports import lean_imports
from scalerl.errors import EXIT_USER_ERROR
from scalerl.rollout.servers.connection import NO_KEY, take_key
from scalerl.rollout.servers.sglang.adapters import add_adapter_hooks
from scalerl.rollout.servers.supervise import SERVER_ID

# What SGLang raises for arguments that its parser takes, and that it refuses once it compares them.
REFUSALS = (ValueError, TypeError, AssertionError, ArithmeticError, NotImplementedError)
# Argument of a server that people ask.
SERVED_NAME = "--served-model-name"
# Argument of a server that says which experts its routers chose.
RETURNS_EXPERTS = "--enable-return-routed-experts"
# Argument of a server that loads adapters.
LOADS_ADAPTERS = "--enable-lora"
# Of a malformed request, those that are named.
MOST_ERRORS = 3
LISTEN_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.1


def freeze_garbage_once_it_listens() -> None:
    """Makes SGLang's own request of /freeze_gc wait until the server listens.

    A thread sends it right after the start. Without a warm-up before it, it is refused and not repeated, and then each
    full garbage collection goes through all modules, which on a CPU takes a second every few steps.
    """
    from sglang.srt.entrypoints import http_server

    freeze = http_server._freeze_gc_after_server_warmup

    def wait_and_freeze(server_args: Any) -> None:
        address, deadline = (server_args.host, server_args.port), time.monotonic() + LISTEN_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                break
            time.sleep(POLL_INTERVAL_S)
        freeze(server_args)

    http_server._freeze_gc_after_server_warmup = wait_and_freeze


def leave_chat_templates_to_tokenizers() -> None:
    """Makes SGLang take the chat template of a model's tokenizer, however its directory is called.

    SGLang itself takes one of its templates where the path has the name of a model that SGLang knows, such as
    /data/vicuna/.
    """
    from sglang.srt.parser import conversation

    conversation.matching_function_registry.clear()


def serve_one_name() -> None:
    """Makes SGLang answer a request for a model of another name with 404, and not with the model that it has."""
    from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

    handle = OpenAIServingBase.handle_request

    async def handle_its_own(self: Any, request: Any, raw_request: Any) -> Any:
        name = self.tokenizer_manager.served_model_name
        # A request that names none has the default.
        if request.model in (name, DEFAULT_MODEL_NAME):
            return await handle(self, request, raw_request)
        message = f"there is no model {request.model!r} here; this server has {name!r}"
        return self.create_error_response(message, "NotFoundError", 404, "model")

    OpenAIServingBase.handle_request = handle_its_own


def say_what_is_wrong_with_a_request() -> None:
    """Makes SGLang's answer to a malformed request name its fields; by itself it shows a line of SGLang's source."""
    from fastapi.exceptions import RequestValidationError
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai.protocol import ErrorResponse

    async def answer(request: Any, error: Any) -> Any:
        # Of a field that may be one of several types there is an error for each.
        texts = dict.fromkeys(f"{_field(each['loc'])}: {each['msg']}" for each in error.errors())
        message = "; ".join(list(texts)[:MOST_ERRORS])
        body = ErrorResponse(message=message, type="BadRequestError", code=400)
        return http_server.ORJSONResponse(body.model_dump(), 400)

    http_server.app.add_exception_handler(RequestValidationError, answer)


def _field(place: Sequence[str | int]) -> str:
    """The field of a request where it is wrong, as messages.0.content, without the names of pydantic's types."""
    parts = [str(part) for part in place if part != "body"]
    return ".".join(part for part in parts if re.fullmatch(r"\d+|[a-z_]+", part) and part not in ("str", "list"))


def name_shared_memory(server_id: str) -> None:
    """Makes SGLang's file of loads in /dev/shm have a name by which the server's supervisor knows it.

    SGLang gives it a random one, and leaves it there when it is killed.
    """
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def named(*args: Any, **kwargs: Any) -> PortArgs:
        return replace(init_new(*args, **kwargs), instance_id=server_id)

    PortArgs.init_new = staticmethod(named)


def number_routers() -> None:
    """Makes every router of a model write the experts that it chose into the row of its layer.

    SGLang gives the number of the layer to the routers of some models alone; others, Mixtral's among them, end the
    server at the first request, if it returns experts.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def number(runner: Any) -> None:
        from sglang.srt.layers.moe.topk import TopK

        for name, module in runner.model.named_modules():
            if (
                isinstance(module, TopK)
                and module.layer_id is None
                and (layer := re.search(r"\blayers\.(\d+)\.", name))
            ):
                module.layer_id = int(layer[1])

    capturer = "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer"
    HookRegistry.register(capturer, number, HookType.BEFORE)


def add_hooks() -> None:
    """Adds what this server's arguments ask for, in each of its processes."""
    if RETURNS_EXPERTS in sys.argv:
        number_routers()
    if LOADS_ADAPTERS in sys.argv:
        add_adapter_hooks()


def refusing(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """A check of SGLang's arguments that ends the process with argparse's exit code where it refuses them.

    By itself SGLang would end with 1, as for what another start may mend.
    """

    def checked(arguments: Any) -> None:
        try:
            check(arguments)
        except REFUSALS:
            traceback.print_exc()
            sys.exit(EXIT_USER_ERROR)

    return checked


def main() -> None:
    key = take_key()
    # Imported here, because SGLang's processes import this module again.
    with lean_imports():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs, prepare_server_args
        from sglang.srt.utils import kill_process_tree

    add_hooks()
    load_plugins()
    for check in ("resolve_once", "check_server_args"):
        setattr(ServerArgs, check, refusing(getattr(ServerArgs, check)))
    arguments = prepare_server_args([*sys.argv[1:], *([] if key == NO_KEY else [f"--api-key={key}"])])
    freeze_garbage_once_it_listens()
    leave_chat_templates_to_tokenizers()
    if SERVED_NAME in sys.argv:
        serve_one_name()
        say_what_is_wrong_with_a_request()
    if SERVER_ID in os.environ:
        name_shared_memory(os.environ[SERVER_ID])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that SGLang spawns, as on a GPU; it loads its plugins, and these hooks with them, later.
    add_hooks()
