"""Runs a function on N ranks with real gloo process groups and returns what each rank returned.

The processes live as long as the test session: a rank joins one job after another and leaves each by
`scalerl.parallel.layout.leave`, as a trainer's ranks do. One that fails, dies or hangs is killed; the next job gets
another in its place. Jobs that measure this process, or change what the next one would find, ask for fresh ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
from torch.distributed import TCPStore

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.dist.preload"])
# Whose functions a job must not leave replaced.
_WATCHED = ("scalerl.", "megatron.core.", "torch.distributed.distributed_c10d")


class _Rank:
    """One process that takes jobs through a pipe; it ends when the pipe does."""

    def __init__(self, fresh: bool) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, fresh))
        self.process.start()
        theirs.close()

    def end(self) -> None:
        below = self._below()
        self.pipe.close()
        self.process.join(timeout=5)
        self._kill(below)

    def kill(self) -> None:
        self._kill(self._below())
        self.pipe.close()

    def _below(self) -> list[psutil.Process]:
        """Of a rank that saved a checkpoint: Megatron's writer, which does not end with it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _kill(self, below: list[psutil.Process]) -> None:
        self.process.kill()
        self.process.join()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


_kept: list[_Rank] = []


def run_ranks(
    world_size: int, function: Callable, *args: Any, timeout_s: float = 240.0, fresh: bool = False
) -> list[Any]:
    """function(*args) on every rank, RANK and friends set; results in rank order. Fails with the first traceback.

    fresh: on processes that ran no job before and will run none after.
    """
    ranks = [] if fresh else _kept
    while len(ranks) < world_size:
        ranks.append(_Rank(fresh))
    mine = ranks[:world_size]
    try:
        results = _run(mine, function, args, time.monotonic() + timeout_s)
    except BaseException:
        ranks[:] = ranks[world_size:]
        for rank in mine:
            rank.kill()
        raise
    if fresh:
        for rank in mine:
            rank.end()
    return results


def end_ranks() -> None:
    """Ends the processes that are kept."""
    while _kept:
        _kept.pop().end()


def _run(ranks: list[_Rank], function: Callable, args: tuple, deadline: float) -> list[Any]:
    # Here, where it is there before the first rank asks: a rank that asks in vain waits a while.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The ranks are clients of the store, all of them.
    meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    for number, rank in enumerate(ranks):
        place = dict(RANK=str(number), WORLD_SIZE=str(len(ranks)), LOCAL_RANK=str(number))
        rank.pipe.send((place | meeting, function, args))
    results = _answers(ranks, deadline)
    # Nobody leaves while another rank may still need it.
    for rank in ranks:
        rank.pipe.send(None)
    _answers(ranks, deadline)
    return results


def _answers(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {rank.pipe: number for number, rank in enumerate(ranks) if number not in results}
        ready = wait(waiting, timeout=deadline - time.monotonic())
        if not ready:
            for number in waiting.values():
                os.kill(ranks[number].process.pid, signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(f"ranks {sorted(waiting.values())} gave no answer in time (stacks above)")
        for pipe in ready:
            number = waiting[pipe]
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                died = f"rank {number} of {len(ranks)} died without a word (see its output above)"
                raise AssertionError(died) from None
            assert error is None, f"rank {number} of {len(ranks)} failed:\n{error}"
            results[number] = result
    return [results[number] for number in range(len(ranks))]


# --- in the rank ---


def _serve(pipe: Connection, fresh: bool) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    random_state = torch.get_rng_state()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        torch.set_rng_state(random_state)
        try:
            if job is None:
                answer = _leave()
            else:
                place, function, args = job
                with contextlib.nullcontext() if fresh else _nothing_left_behind():
                    os.environ.update(place)
                    answer = function(*args)
            # Plain bytes: torch would send tensors as file descriptors that die with the rank.
            message = pickle.dumps((answer, None))
        except BaseException:
            message = pickle.dumps((None, traceback.format_exc()))
        del job
        answer = function = args = None
        pipe.send_bytes(message)


def _leave() -> None:
    from scalerl.parallel.layout import leave

    leave()


@contextlib.contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """The environment is put back; a function that stays replaced is an error."""
    environment, functions = dict(os.environ), _functions()
    yield
    os.environ.clear()
    os.environ.update(environment)
    now = _functions()
    replaced = [name for name, function in functions.items() if not _may_stay(now.get(name), function)]
    assert not replaced, f"the job replaced {replaced}: put them back, or give run_ranks fresh=True"


def _may_stay(function: Any, original: Any) -> bool:
    """What scalerl itself puts in the place of something, or binds an argument of, it means to stay there."""
    ours = str(getattr(function, "__module__", "")).startswith("scalerl.")
    # Every model that is built binds it anew.
    return function is original or ours or getattr(function, "func", function) is getattr(original, "func", original)


def _functions() -> dict[str, Any]:
    """Functions of modules, and of the classes that these define, by their full names."""
    functions = {}
    for module_name, module in list(sys.modules.items()):
        if module_name != "torch.distributed" and not module_name.startswith(_WATCHED):
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                functions[f"{module_name}.{name}"] = value
            if issubclass(type(value), type) and value.__module__ == module_name:
                functions |= {f"{module_name}.{name}.{k}": v for k, v in vars(value).items() if callable(v)}
    return functions
