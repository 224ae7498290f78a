"""`fxtrain config`: its subcommands, and the questions that it asks."""

import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import click

from fxtrain import _extensions
from fxtrain._reading import read_text, write_file
from fxtrain._record import shown
from fxtrain.cli.output import (
    Exit,
    FilePath,
    Words,
    as_json,
    json_asked,
    print_table,
    print_text,
    report,
    warn,
)
from fxtrain.errors import PlanError
from fxtrain.launchers import LaunchSpec, known_launchers
from fxtrain.launchers.config import (
    HERE,
    find_file,
    from_flags,
    launch_config,
    read_launch_file,
    render,
    resolve,
)
from fxtrain.launchers.machine import usable_cores
from fxtrain.state import Plan
from fxtrain.state.files import format_of, read_data
from fxtrain.state.parsing import put
from fxtrain.state.registry import BUILT_IN, installed_configs

_NOTED = 80  # characters of a value
_path = FilePath()
_file = click.option("--config", "-c", "file", default="", type=_path, help="the launch file")
_force = click.option("--force", is_flag=True, help="replace an existing file")
Tables = dict[str, dict[str, Any]]  # `launch` and `plan` of a launch file


@click.group("config", invoke_without_command=True)
@click.option("--config", "-c", "path", default=HERE[0], type=_path, help="the file to write")
@_force
@click.pass_context
def CONFIG(ctx: click.Context, path: str, force: bool) -> None:  # noqa: FBT001
    """Write, show, check and convert launch files.

    Without a command: ask a few questions and write a launch file.
    """
    if ctx.invoked_subcommand:
        return
    _check_new(path, force=force)
    machine = detect_machine()
    _write_new(path, interview(machine, prompt), notes=_head(machine))


@CONFIG.command()
@click.argument("path", default=HERE[0], type=_path)
@click.option("--precision", default="", help="fp32, bf16, fp16 or fp8; by the machine if omitted")
@_force
def default(path: str, precision: str, force: bool) -> None:  # noqa: FBT001
    """Write a launch file without questions.

    It contains values for this machine, and all other fields as comments.
    """
    _check_new(path, force=force)
    machine = detect_machine()
    precision = precision or ("bf16" if machine.bf16 else "")
    plan = {"precision": precision} if precision else {}
    values = {"launch": {"ranks": max(1, machine.count)}, "plan": plan}
    launch_config(values)
    _write_new(path, values, notes=_head(machine))


@CONFIG.command("show")
@_file
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="such as launch.ranks=4")
@click.option("--said", is_flag=True, help="only values that are set, without defaults")
@as_json
def show_values(file: str, words: tuple[str, ...], said: bool) -> None:  # noqa: FBT001
    """Show all values, as the launch file, variables and flags set them."""
    config = resolve(file=file, env=os.environ, flags=from_flags(words))
    values = config.by_path(set_only=said)
    rows = [[path, _shown(value)] for path, value in values.items()]

    def display() -> None:
        print_text(f"launch file: {config.file or 'none (all defaults)'}\n")
        print_table(["value", "is"], rows)

    report({"file": config.file, "values": values}, display)


@CONFIG.command("check")
@click.argument("path", default="", type=_path)
@as_json
def check_file(path: str) -> int:
    """Check that a launch file starts, and that its plan would be accepted.

    Checks its values, what `launch --dry` would refuse on this machine, and what `fx.wrap` would
    refuse on the ranks of the launch, except for names in your model. The exit code is 1 if there
    are errors.
    """

    path = path or find_file(os.environ) or HERE[0]
    if not os.path.exists(path):
        read_launch_file(path)  # raises, also with --json
    try:
        problems = list(_extensions.launch_file_problems(read_launch_file(path)))
    except PlanError as error:
        problems = [line for line in error.message.splitlines() if line != f"{path}:"]
    text = "\n".join([f"{path}:", *problems]) if problems else f"{path} is valid."
    report({"file": path, "problems": problems}, text)
    return Exit.FOUND if problems else Exit.WELL


@CONFIG.command("update")
@click.argument("path", default="", type=_path)
def rewrite(path: str) -> None:
    """Rewrite a launch file with the fields and comments of this version.

    It keeps all values and the comment at the top, and shows the other fields with their
    defaults. Other comments are replaced. A file with errors is not changed.
    """
    path = path or find_file(os.environ) or HERE[0]
    text = render(read_launch_file(path).values, format_of(path))
    lines = read_text(path).splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    write_file(path, "\n".join([*head, "", text]) if head else text)
    print_text(f"Updated {path}. Show all values with `fxtrain config show`.")


@CONFIG.command()
@click.argument("source", default="", type=_path)
@click.argument("path", default=HERE[0], type=_path)
@click.option("--brief", is_flag=True, help="write the converted values without comments")
@_force
@as_json
def convert(source: str, path: str, brief: bool, force: bool) -> None:  # noqa: FBT001
    """Turn an Accelerate config into a launch file.

    SOURCE is a YAML or JSON file of `accelerate config`; by default the last one it wrote.
    Settings without a counterpart are printed, and noted at the top of the new file.
    With --brief the file has the converted values only.
    """

    if not source:  # where `accelerate config` writes its file
        cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "~"), ".cache")
        home = Path(os.environ.get("HF_HOME") or Path(cache, "huggingface"))
        source = str(home / "accelerate" / "default_config.yaml")
        if not Path(source).exists():
            raise PlanError(
                f"`accelerate config` has written no {source}. Name the file to convert: "
                f"fxtrain config convert OLD.yaml."
            )
    data = read_data(source)
    try:
        values, noted = _extensions.convert_accelerate(data)
    except PlanError as error:
        raise PlanError(f"{source}:\n{error}") from None
    notes = [f"{key} = {_quoted_value(value)}: {text}." for key, value, text in noted]
    if json_asked():
        listed = [
            {"key": k, "value": _plain_value(value), "text": text} for k, value, text in noted
        ]
        report({**values, "notes": listed}, "")
        return
    changed = " Changed or without a counterpart:" if notes else ""
    head = [f"Converted from {source}.{changed}", *notes]
    _check_new(path, force=force)
    _write_new(path, values, notes=head, brief=brief)
    for note in (*notes, *_extensions.launch_file_problems(launch_config(values))):
        warn(note)


def _check_new(path: str, *, force: bool) -> None:
    """Refuse to write a launch file of an unknown format, or one that exists, without `force`."""
    format_of(path)
    if Path(path).exists() and not force:
        raise PlanError(
            f"{path} already exists. Choose another name, or use --force to replace it."
        )


def _write_new(
    path: str, values: Mapping[str, Any], *, notes: list[str], brief: bool = False
) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render(values, format_of(path), notes=notes, brief=brief))
    named = "" if path in HERE else f" --config {shlex.quote(path)}"  # those are found without
    print_text(
        f"Wrote {path}. Use it with `fxtrain launch{named} train.py`. Show all values with "
        f"`fxtrain config show{named}`."
    )


def _plain_value(value: Any) -> Any:
    """A value in a note, for JSON; one that JSON does not have, such as a date of YAML, as text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return _quoted_value(value)
    return value


def _quoted_value(value: Any) -> str:
    """A value in a note; text without quotes, as written in the file."""
    return value if isinstance(value, str) and len(value) < _NOTED else shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "" if not value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


@attrs.frozen(kw_only=True)
class MachineFacts:
    """Properties of a machine on which defaults of a launch file depend."""

    cores: int = 1  # that a process may use
    kind: str = "cpu"  # type of its accelerators, as torch names it
    count: int = 0  # of accelerators
    bf16: bool = False  # whether they compute in it
    slurm: bool = False  # whether a cluster accepts jobs here
    tpu: bool = False  # whether the environment names one


def detect_machine() -> MachineFacts:
    """Inspect this machine; imports torch and asks it for devices."""
    torch = import_module("torch")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "cpu"
    supports_bf16 = getattr(getattr(torch, kind, None), "is_bf16_supported", None)
    return MachineFacts(
        cores=len(usable_cores()),
        kind=kind,
        count=torch.accelerator.device_count() if accelerator else 0,
        bf16=bool(accelerator and supports_bf16 and supports_bf16()),
        slurm=bool(shutil.which("sbatch")),
        tpu=bool(os.environ.get("TPU_NAME")),
    )


def _head(machine: MachineFacts) -> list[str]:
    devices = f"{machine.count} {machine.kind} devices" if machine.count else "no accelerator"
    return [
        f"Written by fxtrain config on a machine with {devices} and {machine.cores} cores.",
        "Commented-out lines show defaults.",
    ]


# Takes a path of the launch file, the text of its question, and a function that reads what was
# typed: asks until that accepts it, and returns its result.
AskFunction = Callable[[str, str, Callable[[str], Any]], Any]


WHOLE, YES, WORDS = click.IntRange(0, 10**9), click.BOOL, Words()
# By launcher: its options, each with a text, a default and a type.
_OPTIONS: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "mpi": [("hostfile", "File with the names of the machines?")],
    "deepspeed": [
        ("hostfile", "File with lines such as worker-0 slots=8? (empty: here)"),
        ("include", "Which of them, such as worker-0@worker-1:0? (empty: all)"),
    ],
    "slurm": [
        ("partition", "Which partition?"),
        ("account", "Which account is charged?"),
        ("time", "Time limit? (such as 1-12:00:00)"),
        ("gpus_per_node", "How many GPUs on each node?"),
        ("requeue", "Requeue after preemption or the time limit?", True, YES),
    ],
    "tpu-pod": [("name", "Name of the TPU VM?"), ("zone", "Its zone? (empty: gcloud's own)")],
    "ray": [
        ("job_server", "Job server, such as http://head:8265? (empty: none)"),
        ("gpus_per_rank", "How many GPUs for each rank?", 0, WHOLE),
    ],
    "kubernetes": [
        ("image", "Which container image? (with fxtrain and the program)"),
        ("namespace", "Which namespace?"),
        ("gpus", "How many accelerators for each pod?", 0, WHOLE),
    ],
    "sagemaker": [
        ("role", "Name of the IAM role?"),
        ("instance_type", "Type of machine? (such as ml.p4d.24xlarge)"),
        ("spot", "Use spot instances, which may be interrupted?", False, YES),
    ],
}


def interview(machine: MachineFacts, ask: AskFunction) -> Tables:
    """Ask every question that the earlier answers leave open; the values for a launch file.

    Defaults and some questions depend on the machine. `ask` repeats a question while reading the
    answer raises click.UsageError.
    """
    answers: dict[str, Any] = {}

    def answer(
        path: str,
        text: str,
        default: Any = None,
        kind: click.ParamType = click.STRING,
        choices: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        offer = ("yes" if default else "no") if kind is YES else default
        shown_default = "" if offer in (None, "", []) else f" [{offer}]"
        meanings = [f"  {name}: {meaning}" for name, meaning in choices.items()]

        def read(typed: str) -> Any:
            value = default
            if typed.strip():
                form = click.Choice([*choices]) if choices else kind
                value = form.convert(typed.strip(), None, None)
            try:
                launch_config(values_of({**answers, path: value}))
            except PlanError as error:
                raise click.UsageError(error.message.partition(": ")[2]) from None
            return value

        answers[path] = ask(path, "\n".join([text, *meanings, shown_default]), read)
        return answers[path]

    ranks = _ask_launch(machine, answer)
    _ask_plan(machine, answer, ranks)
    return values_of(answers)


def _ask_launch(machine: MachineFacts, answer: Callable[..., Any]) -> int:
    """Ask about the launch; the number of all ranks, or 2 where the machines decide it."""
    launchers = known_launchers()
    name = answer(
        "launch.launcher", "Which launcher starts the ranks?",
        "slurm" if machine.slurm else "tpu-pod" if machine.tpu else "native",
        choices={name: row.help for name, row in launchers.items()},
    )  # fmt: skip
    native, nodes = name == "native", 1
    if name not in ("tpu", "tpu-pod"):
        nodes = answer("launch.nodes", "On how many machines?", 1, WHOLE)
    if native and nodes > 1:
        answer("launch.main_address", "Host name or address of the first machine?")
        answer("launch.main_port", "A free port on it?", 29_500, WHOLE)
        kinds = {
            "static": "each is started with its own --node-rank",
            "c10d": "in any order, and again after one has failed",
        }
        text = "How do the machines find each other?"
        answer("launch.rendezvous", text, "static", choices=kinds)
    ranks = 2
    if name != "tpu":
        text = (
            f"How many ranks on each machine? (this one has {machine.count} accelerators and "
            f"{machine.cores} cores)"
        )
        ranks = answer("launch.ranks", text, max(1, machine.count), WHOLE)
    cpu = native and machine.count and answer("launch.cpu", "Compute on the CPU only?", kind=YES)
    if native and not cpu and ranks < machine.count:
        text = "Which accelerators? (comma-separated numbers; empty: all)"
        answer("launch.gpus", text, kind=WORDS)
    if "restarts" in launchers[name].uses:
        answer("launch.restarts", "How often may the ranks restart after a failure?", 0, WHOLE)
    for option, *fields in _OPTIONS.get(name, ()):
        answer(f"launch.options.{option}", *fields)
    return ranks * nodes


def _ask_plan(machine: MachineFacts, answer: Callable[..., Any], ranks: int) -> None:
    kind = "ddp"
    if ranks > 1:
        configs = {
            str(attrs.fields_dict(config)["kind"].default): config
            for config in (*BUILT_IN, *installed_configs())
        }
        del configs["single"]  # for one rank
        about = {name: (row.__doc__ or "").strip() for name, row in configs.items()}
        kind = answer(
            "plan.strategy.kind", "How is the model distributed over the ranks?", kind,
            choices={name: text.partition("\n")[0] for name, text in about.items()},
        )  # fmt: skip
    if kind == "fsdp":
        modes = {
            "full": "parameters, gradients and optimizer states (ZeRO-3)",
            "grads_and_optimizer": "gradients and optimizer states (ZeRO-2)",
            "none": "nothing, as DDP",
        }
        answer("plan.strategy.mode", "What is sharded?", "full", choices=modes)
        text = "Class names of the blocks? (empty: chosen by the model)"
        answer("plan.strategy.wrap", text, [], WORDS)
        text = "Keep parameters and optimizer states in host memory?"
        answer("plan.strategy.offload", text, kind=YES)
    if kind == "deepspeed":
        text = "Which ZeRO stage, 0 to 3? (empty: 2, or the file's)"
        answer("plan.strategy.stage", text, kind=WHOLE)
        answer("plan.strategy.config", "A DeepSpeed JSON file? (empty: none)")
        text = "Offload optimizer states to cpu or nvme? (empty: no)"
        answer("plan.strategy.offload_optimizer", text)
    precisions = {
        "fp32": "as the model is",
        "bf16": "half the memory, for newer devices",
        "fp16": "with a loss scale, for older devices",
    }
    best = "bf16" if machine.bf16 else "fp32"
    answer("plan.precision", "In which precision?", best, choices=precisions)
    answer("plan.accumulate", "Micro-batches per optimizer update?", 1, WHOLE)
    answer("plan.clip_norm", "Maximum gradient norm? (empty: no clipping)", None, click.FLOAT)
    answer("plan.compile", "Compile the model with torch.compile?", kind=YES)


def values_of(answers: Mapping[str, Any]) -> Tables:
    """What the answers put into a launch file: everything but defaults, and the ranks."""
    fields = [("launch", attrs.fields(LaunchSpec)), ("plan", attrs.fields(Plan))]
    defaults = {f"{part}.{field.name}": field.default for part, each in fields for field in each}
    defaults |= {"plan.strategy.kind": "ddp", "plan.precision": "fp32", "plan.compile": False}
    values: Tables = {"launch": {}, "plan": {}}
    for path, value in answers.items():
        if value in (None, "", []) or (path != "launch.ranks" and value == defaults.get(path)):
            continue
        values = put(values, path, value)
    strategy = values["plan"].get("strategy", {})
    if strategy and "kind" not in strategy:
        values = put(values, "plan.strategy.kind", answers["plan.strategy.kind"])
    return values


def prompt(path: str, text: str, read: Callable[[str], Any]) -> Any:
    """Ask on the terminal, or read the lines of a pipe."""
    return click.prompt(text, default="", show_default=False, prompt_suffix="> ", value_proc=read)
