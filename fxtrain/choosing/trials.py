"""Dry runs of one plan: in processes of their own, and from a cache."""

import hashlib
import io
import itertools
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import torch

from fxtrain import __version__, ops
from fxtrain._reading import write_file
from fxtrain.choosing.candidates import Question, Trial, survey
from fxtrain.profiling.rehearsal import place, rehearse
from fxtrain.state import DryRun, Wrapped, dumps

Look = Callable[[Wrapped], object]
# (trial, world, rank, look) → a dry run of the user's program.
Program = Callable[[Trial, int, int, Look], DryRun]
# Micro-batches of an update in a dry run, at most: longer updates follow from one and two.
SHORT = 2
_PACKAGE = str(Path(__file__).parents[1])


def run_function(
    train: Callable[..., object],
    attempt: Trial,
    world: int,
    rank: int = 0,
    look: Look | None = None,
) -> DryRun:
    """A dry run of a function (context, batch size, plan) → anything; its rest is a `Program`."""
    plan, _ = attempt
    variables = place(world, rank, plan.mesh)

    def call() -> None:
        with ops.detect(variables, device="cpu", mesh=plan.mesh) as ctx:
            train(ctx, batch_size(attempt), plan)

    name = getattr(train, "__name__", type(train).__name__)
    return rehearse(call, variables, name=name, mesh=plan.mesh, device_memory=None, look=look)


def batch_size(attempt: Trial) -> int:
    """Rows of a batch of the loader: of each data rank, or of all under `batch="global"`."""
    plan, size = attempt
    mesh = plan.mesh
    return size * mesh.replicate * mesh.shard if mesh and plan.batch == "global" else size


def dry_runs(
    program: Program, attempt: Trial, world: int, question: Question | None, cache: str
) -> dict[str, Any]:
    """The dry runs of a plan, as plain data that can be sent and stored.

    Args:
        program: What is trained.
        attempt: The plan, and rows of a micro-batch.
        world: World size.
        question: If given, what the model allows is part of the answer.
        cache: Folder of earlier answers; empty for none.

    Returns:
        "runs", a list of [accumulate, rank, JSON of the run]: two if an update has more than two
        micro-batches, and for a pipeline those of its first and last stage. "about", the rows of a
        micro-batch on all ranks, or a `survey`.

    Effects:
        Those of the program, whose output is dropped. Writes a file into the folder.
    """
    plan, size = attempt
    path = Path(cache, f"{_key(program, attempt, world, question)}.json") if cache else None
    if path is not None and path.is_file():
        known = json.loads(path.read_text("utf-8"))
        if all(_digest(file) == digest for file, digest in known["files"].items()):
            return known["answer"]
    about: dict[str, Any] = {}

    def look(model: Wrapped) -> None:
        rows = {"rows": sum(model.window.sizes)}
        about.update(rows if question is None else survey(model, question))

    staged = plan.mesh is not None and plan.mesh.pipeline > 1
    counts = [plan.accumulate] if plan.accumulate <= SHORT else range(1, SHORT + 1)
    runs: list[list[Any]] = []
    for count, rank in itertools.product(counts, (0, world - 1) if staged else (0,)):
        short = attrs.evolve(plan, accumulate=count)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            run = program((short, size), world, rank, look)
        runs.append([count, rank, dumps(attrs.evolve(run, timeline=(), setup=()))])
    answer = {"runs": runs, "about": about}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"answer": answer, "files": _sources(program)}))
    return answer


def _key(program: Program, attempt: Trial, world: int, question: Question | None) -> str:
    plan, size = attempt
    asked: list[Any] = [dumps(plan), size, world, __version__, torch.__version__]
    if question is not None:
        asked += [dumps(question.plan), sorted(question.fixed), question.world, question.node]
        asked += [question.rows, question.own_plan]
    return hashlib.sha256(pickle.dumps(program) + repr(asked).encode()).hexdigest()


def _sources(program: Any) -> dict[str, str]:
    """Digests of the user's files: modules outside of Python's folders, and files named in words.

    Those are the script itself and its arguments.
    """
    words = [word for word in getattr(program, "args", ()) if isinstance(word, str | tuple)]
    named = [word for part in words for word in ((part,) if isinstance(part, str) else part)]
    files = {str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}
    libraries = (sys.prefix, sys.base_prefix, _PACKAGE)
    own = {file for file in files if not file.startswith(libraries)}
    return {file: _digest(file) for file in sorted(own | set(named)) if os.path.isfile(file)}


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if os.path.isfile(file) else ""


class _Here(Executor):
    """Calls functions in this process, one after another."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # which the caller gets from the future
            future.set_exception(error)
        return future


@contextmanager
def workers(program: Program, processes: int, seconds: float) -> Iterator[Executor]:
    """Processes for dry runs, which end after some seconds at the latest.

    A program that cannot be sent to another process, such as a function inside another one, runs
    in this one.
    """
    if processes == 1 or not _can_be_sent(program):
        yield _Here()
        return
    context, limit = get_context("spawn"), (seconds,)
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=limit)
    with pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(seconds: float) -> None:
    """Called in a new process: one core for it, and an end."""
    torch.set_num_threads(1)
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _can_be_sent(program: Program) -> bool:
    try:
        return pickle.loads(pickle.dumps(program)) is not None
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
