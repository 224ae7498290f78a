"""The questions of `fxtrain config`, and the machine on which their defaults depend."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

import attrs
import click

from fxtrain.cli.output import (
    Words,
)
from fxtrain.errors import PlanError
from fxtrain.launchers import LaunchSpec, known_launchers
from fxtrain.launchers.config import (
    launch_config,
)
from fxtrain.launchers.machine import usable_cores
from fxtrain.state import Plan
from fxtrain.state.parsing import put
from fxtrain.state.registry import BUILT_IN, installed_configs

Tables = dict[str, dict[str, Any]]  # `launch` and `plan` of a launch file


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
