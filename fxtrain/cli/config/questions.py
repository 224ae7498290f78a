"""The questions of `fxtrain config`, in the order in which they are asked."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import click

from fxtrain.launchers import LaunchSpec, known_launchers
from fxtrain.launchers.config.defaults import Machine
from fxtrain.launchers.config.launch_file import Section, problems_of
from fxtrain.state import Plan
from fxtrain.state.parsing import put
from fxtrain.state.registry import BUILT_IN

_TYPES: Mapping[str, click.ParamType] = {
    "yes": click.BOOL,
    "whole": click.IntRange(0, 10**9),
    "number": click.FLOAT,
    "text": click.STRING,
}

Answers = Mapping[str, Any]


@attrs.frozen
class Question:
    """One question.

    Attributes:
        path: The value in the launch file that it sets.
        text: The question itself.
        kind: choice: one of several; yes: yes or no; whole: a whole number of at least 0; number: a
            number; text: a text; words: texts separated by commas.
        choices: Values with their meanings.
        default: The value for an empty answer; None leaves it unset.
        when: Whether it is asked after these answers.
    """

    path: str
    text: str
    kind: Literal["choice", "yes", "whole", "number", "text", "words"] = "text"
    choices: tuple[tuple[str, str], ...] = ()
    default: Any = None
    when: Callable[[Answers], bool] = lambda answers: True


def questions(machine: Machine) -> list[Question]:
    """All questions, for this machine."""
    return [*_launch_questions(machine), *_launcher_questions(), *_plan_questions(machine)]


def next_question(answers: Answers, machine: Machine) -> Question | None:
    """The first applicable question without an answer; None at the end.

    Example:
        >>> from fxtrain.cli.config import next_question
        >>> from fxtrain.launchers.config import Machine
        >>> next_question({"launch.launcher": "native", "launch.nodes": 1}, Machine()).path
        'launch.ranks'
    """
    return next((q for q in questions(machine) if q.path not in answers and q.when(answers)), None)


def _launch_questions(machine: Machine) -> list[Question]:
    launchers = known_launchers()

    def is_native(answers: Answers) -> bool:
        return answers["launch.launcher"] == "native"

    def has_several_nodes(answers: Answers) -> bool:
        return is_native(answers) and answers["launch.nodes"] > 1

    def uses_some_gpus(answers: Answers) -> bool:
        some = answers.get("launch.ranks", machine.count) < machine.count
        return is_native(answers) and not answers.get("launch.cpu") and some

    ranks = (
        f"How many ranks on each machine? (this one has {machine.count} accelerators and "
        f"{machine.cores} cores)"
    )
    return [
        Question("launch.launcher", "Which launcher starts the ranks?", "choice",
                 choices=tuple((name, row.help) for name, row in launchers.items()),
                 default="slurm" if machine.slurm else "tpu-pod" if machine.tpu else "native"),
        Question("launch.nodes", "On how many machines?", "whole", default=1,
                 when=lambda answers: answers["launch.launcher"] not in ("tpu", "tpu-pod")),
        Question("launch.main_address", "Host name or address of the first machine?",
                 when=has_several_nodes),
        Question("launch.main_port", "A free port on it?", "whole", default=29_500,
                 when=has_several_nodes),
        Question("launch.rendezvous", "How do the machines find each other?", "choice",
                 choices=(("static", "each is started with its own --node-rank"),
                          ("c10d", "in any order, and again after one has failed")),
                 default="static", when=has_several_nodes),
        Question("launch.ranks", ranks, "whole", default=max(1, machine.count),
                 when=lambda answers: answers["launch.launcher"] != "tpu"),
        Question("launch.cpu", "Compute on the CPU only?", "yes", default=False,
                 when=lambda answers: machine.count > 0 and is_native(answers)),
        Question("launch.gpus", "Which accelerators? (comma-separated numbers; empty: all)",
                 "words", when=uses_some_gpus),
        Question("launch.restarts", "How often may the ranks restart after a failure?", "whole",
                 default=0,
                 when=lambda answers: "restarts" in launchers[answers["launch.launcher"]].uses),
    ]  # fmt: skip


def _launcher_questions() -> list[Question]:
    def option(
        launcher: str, name: str, text: str, kind: Any = "text", default: Any = "", **more: Any
    ) -> Question:
        def when(answers: Answers) -> bool:
            return answers["launch.launcher"] == launcher

        path = f"launch.options.{name}"
        return Question(path, text, kind, default=default, when=when, **more)

    objects = (("jobset", ""), ("pytorchjob", "of Kubeflow's training operator"))
    return [
        option("mpi", "hostfile", "File with the names of the machines?"),
        option("deepspeed", "hostfile", "File with lines such as worker-0 slots=8? (empty: here)"),
        option("deepspeed", "include", "Which of them, such as worker-0@worker-1:0? (empty: all)"),
        option("slurm", "partition", "Which partition?"),
        option("slurm", "account", "Which account is charged?"),
        option("slurm", "time", "Time limit? (such as 1-12:00:00)"),
        option("slurm", "gpus_per_node", "How many GPUs on each node?"),
        option("slurm", "requeue", "Requeue after preemption or the time limit?", "yes",
               default=True),
        option("tpu-pod", "name", "Name of the TPU VM?"),
        option("tpu-pod", "zone", "Its zone? (empty: gcloud's own)"),
        option("ray", "job_server", "Job server, such as http://head:8265? (empty: none)"),
        option("ray", "gpus_per_rank", "How many GPUs for each rank?", "whole", default=0),
        option("kubernetes", "manifest", "Which kind of object?", "choice", "jobset",
               choices=objects),
        option("kubernetes", "image", "Which container image? (with fxtrain and the program)"),
        option("kubernetes", "namespace", "Which namespace?"),
        option("kubernetes", "gpus", "How many accelerators for each pod?", "whole", default=0),
        option("sagemaker", "role", "Name of the IAM role?"),
        option("sagemaker", "instance_type", "Type of machine? (such as ml.p4d.24xlarge)"),
        option("sagemaker", "spot", "Use spot instances, which may be interrupted?", "yes",
               default=False),
    ]  # fmt: skip


def _plan_questions(machine: Machine) -> list[Question]:
    configs = (*BUILT_IN, *machine.strategies)
    kinds = tuple(
        (kind, (config.__doc__ or "").strip().partition("\n")[0])
        for config in configs
        if (kind := str(attrs.fields_dict(config)["kind"].default)) != "single"  # for one rank
    )

    def has_several_ranks(answers: Answers) -> bool:
        return answers.get("launch.ranks", 2) * answers.get("launch.nodes", 1) > 1

    def uses_fsdp(answers: Answers) -> bool:
        return answers.get("plan.strategy.kind") == "fsdp"

    def uses_deepspeed(answers: Answers) -> bool:
        return answers.get("plan.strategy.kind") == "deepspeed"

    return [
        Question("plan.strategy.kind", "How is the model distributed over the ranks?", "choice",
                 choices=kinds, default="ddp", when=has_several_ranks),
        Question("plan.strategy.mode", "What is sharded?", "choice",
                 choices=(("full", "parameters, gradients and optimizer states (ZeRO-3)"),
                          ("grads_and_optimizer", "gradients and optimizer states (ZeRO-2)"),
                          ("none", "nothing, as DDP")),
                 default="full", when=uses_fsdp),
        Question("plan.strategy.wrap", "Class names of the blocks? (empty: chosen by the model)",
                 "words", default=[], when=uses_fsdp),
        Question("plan.strategy.offload", "Keep parameters and optimizer states in host memory?",
                 "yes", default=False, when=uses_fsdp),
        Question("plan.strategy.stage", "Which ZeRO stage, 0 to 3? (empty: 2, or the file's)",
                 "whole", when=uses_deepspeed),
        Question("plan.strategy.config", "A DeepSpeed JSON file? (empty: none)",
                 when=uses_deepspeed),
        Question("plan.strategy.offload_optimizer",
                 "Offload optimizer states to cpu or nvme? (empty: no)", when=uses_deepspeed),
        Question("plan.precision", "In which precision?", "choice",
                 choices=(("fp32", "as the model is"),
                          ("bf16", "half the memory, for newer devices"),
                          ("fp16", "with a loss scale, for older devices")),
                 default="bf16" if machine.bf16 else "fp32"),
        Question("plan.accumulate", "Micro-batches per optimizer update?", "whole", default=1),
        Question("plan.clip_norm", "Maximum gradient norm? (empty: no clipping)", "number"),
        Question("plan.compile", "Compile the model with torch.compile?", "yes", default=False),
    ]  # fmt: skip


def read_answer(question: Question, text: str) -> Any:
    """The value of a typed answer; that of an empty one is the default.

    Raises:
        ValueError: it does not answer the question; the message says what would.

    Example:
        >>> from fxtrain.cli.config import Question, read_answer
        >>> read_answer(Question(path="launch.ranks", text="How many?", kind="whole"), "4")
        4
    """
    text = text.strip()
    if not text:
        return question.default
    names = [name for name, _ in question.choices]
    if text.isdecimal() and 1 <= int(text[:9]) <= len(names):
        return names[int(text) - 1]
    if question.kind == "words":
        return [word.strip() for word in text.split(",") if word.strip()]
    kind = click.Choice(names) if question.kind == "choice" else _TYPES[question.kind]
    try:
        return kind.convert(text, None, None)
    except click.BadParameter as error:
        raise ValueError(error.message) from None


def problem_with(question: Question, value: Any, answers: Answers, machine: Machine) -> str:
    """What the records object to in a value; empty if it agrees with earlier answers."""
    problems = problems_of(section_of({**answers, question.path: value}), more=machine.strategies)
    return problems[0].partition(": ")[2] if problems else ""


def section_of(answers: Answers) -> Section:
    """What the answers put into a launch file: everything but defaults, and the ranks.

    Example:
        >>> from fxtrain.cli.config import section_of
        >>> section_of({"launch.ranks": 2, "launch.nodes": 1, "plan.precision": "bf16"})
        Section(launch={'ranks': 2}, plan={'precision': 'bf16'})
    """
    fields = [("launch", attrs.fields(LaunchSpec)), ("plan", attrs.fields(Plan))]
    defaults = {f"{part}.{field.name}": field.default for part, each in fields for field in each}
    defaults |= {"plan.strategy.kind": "ddp", "plan.precision": "fp32", "plan.compile": False}
    data: dict[str, Any] = {"launch": {}, "plan": {}}
    for path, value in answers.items():
        if value in (None, "", []) or (path != "launch.ranks" and value == defaults.get(path)):
            continue
        if path == "plan.compile":
            data = put(data, "plan.compile.backend", "inductor")
        else:
            data = put(data, path, value)
    strategy = data["plan"].get("strategy", {})
    if strategy and "kind" not in strategy:
        data = put(data, "plan.strategy.kind", answers["plan.strategy.kind"])
    return Section(launch=data["launch"], plan=data["plan"])
