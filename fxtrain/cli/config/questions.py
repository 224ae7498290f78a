"""The questions of `fxtrain config`: the next one is a pure function of the answers."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs

from fxtrain.launch import LaunchSpec, known_launchers
from fxtrain.launch.config.defaults import Machine
from fxtrain.launch.config.launch_file import Section, problems_of
from fxtrain.launch.config.rendering import meanings
from fxtrain.state import Plan
from fxtrain.state.parsing import put
from fxtrain.state.registry import BUILT_IN

__all__ = ["Question", "next_question", "problem_with", "read_answer", "section_of"]

Answers = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Question:
    """One question.

    Attributes:
        path: The value in the launch file that it sets.
        text: The question itself.
        kind: choice: one of several; yes: yes or no; whole: a whole number of at least 0; number: a
            number; text: a text; words: texts separated by commas.
        choices: Values with their meanings.
        default: The value for an empty answer; None leaves it unset.
    """

    path: str
    text: str
    kind: Literal["choice", "yes", "whole", "number", "text", "words"] = "text"
    choices: tuple[tuple[str, str], ...] = ()
    default: Any = None


@attrs.frozen(kw_only=True)
class _Entry:
    """A question, and whether it applies given these answers on this machine."""

    ask: Callable[[Answers, Machine], Question]
    matters: Callable[[Answers, Machine], bool] = lambda answers, machine: True
    path: str


def next_question(answers: Answers, machine: Machine) -> Question | None:
    """The first applicable question without an answer; None at the end.

    Example:
        >>> from fxtrain.cli.config import next_question
        >>> from fxtrain.launch.config import Machine
        >>> next_question({"launch.launcher": "native", "launch.nodes": 1}, Machine()).path
        'launch.ranks'
    """
    for row in _rows(answers, machine):
        if row.path not in answers and row.matters(answers, machine):
            return row.ask(answers, machine)
    return None


def read_answer(question: Question, said: str) -> Any:
    """The value of a typed answer; None if it is empty and there is no default.

    Raises:
        ValueError: it does not answer the question; the message says what would.

    Example:
        >>> from fxtrain.cli.config import Question, read_answer
        >>> read_answer(Question(path="launch.ranks", text="How many?", kind="whole"), "4")
        4
    """
    said = said.strip()
    if not said:
        return question.default
    if question.kind == "words":
        return [word.strip() for word in said.split(",") if word.strip()]
    reads = {"choice": _choice, "yes": _yes, "whole": _whole, "number": _number}
    return reads[question.kind](question, said) if question.kind in reads else said


def problem_with(question: Question, value: Any, answers: Answers, machine: Machine) -> str:
    """What the records object to in a value; empty if it agrees with earlier answers."""
    told = problems_of(section_of({**answers, question.path: value}), more=machine.strategies)
    return told[0].partition(": ")[2] if told else ""


def section_of(answers: Answers) -> Section:
    """What the answers put into a launch file: everything but defaults, and the ranks.

    Example:
        >>> from fxtrain.cli.config import section_of
        >>> section_of({"launch.ranks": 2, "launch.nodes": 1, "plan.precision": "bf16"})
        Section(launch={'ranks': 2}, plan={'precision': 'bf16'})
    """
    data: dict[str, Any] = {"launch": {}, "plan": {}}
    for path, value in answers.items():
        if path == "plan.compile":
            data = put(data, "plan.compile.backend", "inductor") if value else data
        elif value not in (None, "", []) and (path == "launch.ranks" or value != _default(path)):
            data = put(data, path, value)
    strategy = data["plan"].get("strategy", {})
    if strategy and "kind" not in strategy:
        data = put(data, "plan.strategy.kind", answers["plan.strategy.kind"])
    return Section(launch=data["launch"], plan=data["plan"])


# Launcher options and strategy fields that most users set.
_OPTIONS = {
    "mpi": ("hostfile",),
    "deepspeed": ("hostfile", "include"),
    "slurm": ("partition", "account", "time", "gpus_per_node", "requeue"),
    "tpu-pod": ("name", "zone"),
    "ray": ("job_server", "gpus_per_rank"),
    "kubernetes": ("manifest", "image", "namespace", "gpus"),
    "sagemaker": ("role", "instance_type", "spot"),
}
_FIELDS = {
    "fsdp": ("mode", "wrap", "offload"),
    "deepspeed": ("stage", "config", "offload_optimizer"),
}


def _rows(answers: Answers, machine: Machine) -> list[_Entry]:
    launcher = answers.get("launch.launcher", "native")
    return [*_launch_rows(), *_option_rows(launcher), *_plan_rows(answers, machine)]


def _launch_rows() -> list[_Entry]:
    def several(answers: Answers, _: Machine) -> bool:
        return answers.get("launch.nodes", 1) > 1 and answers["launch.launcher"] == "native"

    return [
        _Entry(path="launch.launcher", ask=_ask_launcher),
        _Entry(path="launch.nodes", ask=_fixed("launch.nodes", "On how many machines?", "whole", 1),
             matters=lambda answers, _: answers["launch.launcher"] not in ("tpu", "tpu-pod")),
        _Entry(path="launch.main_address", matters=several, ask=_fixed(
            "launch.main_address", "Host name or address of the first machine?", "text")),
        _Entry(path="launch.main_port", matters=several, ask=_fixed(
            "launch.main_port", "A free port on it?", "whole", 29_500)),
        _Entry(path="launch.rendezvous", matters=several, ask=lambda *_: Question(
            path="launch.rendezvous", text="How do the machines find each other?", kind="choice",
            choices=(("static", "each is started with its own --node-rank"),
                     ("c10d", "in any order, and again after one has failed")),
            default="static")),
        _Entry(path="launch.ranks", ask=lambda _, machine: Question(
            path="launch.ranks", kind="whole", default=max(1, machine.count),
            text=f"How many ranks on each machine? (this one has {machine.count} accelerators "
                 f"and {machine.cores} cores)"),
             matters=lambda answers, _: answers["launch.launcher"] != "tpu"),
        _Entry(path="launch.cpu", ask=_fixed(
            "launch.cpu", "Compute on the CPU only?", "yes", default=False),
             matters=lambda answers, machine: machine.count > 0 and _native(answers)),
        _Entry(path="launch.gpus", ask=_fixed(
            "launch.gpus", "Which accelerators? (comma-separated numbers; empty: all)", "words"),
             matters=lambda answers, machine: (
                 _native(answers) and not answers.get("launch.cpu")
                 and answers["launch.ranks"] < machine.count)),
        _Entry(path="launch.restarts", ask=_fixed(
            "launch.restarts", "How often may the ranks restart after a failure?", "whole", 0),
             matters=lambda answers, _: (
                 "restarts" in known_launchers()[answers["launch.launcher"]].uses)),
    ]  # fmt: skip


def _plan_rows(answers: Answers, machine: Machine) -> list[_Entry]:
    kind = answers.get("plan.strategy.kind", "")
    fields = [
        _record_row(config, f"plan.strategy.{name}")
        for config in _configs(machine)
        if _tag(config) == kind
        for name in _FIELDS.get(kind, ())
        if name in attrs.fields_dict(config)
    ]
    return [
        _Entry(path="plan.strategy.kind", ask=_ask_strategy,
             matters=lambda answers, _: (
                 answers.get("launch.ranks", 2) * answers.get("launch.nodes", 1) > 1)),
        *fields,
        _Entry(path="plan.precision", ask=lambda _, machine: Question(
            path="plan.precision", text="In which precision?", kind="choice",
            choices=(("fp32", "as the model is"), ("bf16", "half the memory, for newer devices"),
                     ("fp16", "with a loss scale, for older devices")),
            default="bf16" if machine.bf16 else "fp32")),
        _Entry(path="plan.accumulate", ask=_fixed(
            "plan.accumulate", "Micro-batches per optimizer update?", "whole", 1)),
        _Entry(path="plan.clip_norm", ask=_fixed(
            "plan.clip_norm", "Maximum gradient norm? (empty: no clipping)", "number")),
        _Entry(path="plan.compile", ask=_fixed(
            "plan.compile", "Compile the model with torch.compile?", "yes", default=False)),
    ]  # fmt: skip


def _option_rows(launcher: str) -> list[_Entry]:
    record = known_launchers()[launcher].options
    return [_record_row(record, f"launch.options.{name}") for name in _OPTIONS.get(launcher, ())
            if record and name in attrs.fields_dict(record)]  # fmt: skip


def _record_row(record: type, path: str) -> _Entry:
    """A question derived from a field's type and the record's docstring."""
    field = attrs.fields_dict(record)[path.rpartition(".")[2]]
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    kind, choices = _kind_of(field)
    question = Question(
        path=path,
        text=meanings(record).get(field.name, field.name),
        kind=kind,
        choices=tuple((choice, "") for choice in choices),
        default=default,
    )
    return _Entry(path=path, ask=lambda *_: question)


def _kind_of(field: Any) -> tuple[Any, tuple[str, ...]]:
    members = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    if get_origin(field.type) is Literal or get_origin(members[0]) is Literal:
        known = get_args(field.type if get_origin(field.type) is Literal else members[0])
        return ("choice", known) if field.default is not None else ("text", ())
    if get_origin(field.type) is tuple:
        return "words", ()
    return {bool: "yes", int: "whole", float: "number"}.get(members[0], "text"), ()


def _fixed(path: str, text: str, kind: Any, default: Any = None) -> Callable[..., Question]:
    return lambda *_: Question(path=path, text=text, kind=kind, default=default)


def _ask_launcher(_: Answers, machine: Machine) -> Question:
    usual = "slurm" if machine.slurm else "tpu-pod" if machine.tpu else "native"
    return Question(
        path="launch.launcher",
        text="Which launcher starts the ranks?",
        kind="choice",
        choices=tuple((name, row.help) for name, row in known_launchers().items()),
        default=usual,
    )


def _ask_strategy(_: Answers, machine: Machine) -> Question:
    kinds = {
        _tag(config): (config.__doc__ or "").strip().partition("\n")[0]
        for config in _configs(machine)
    }
    kinds.pop("single", None)  # for one rank only
    return Question(
        path="plan.strategy.kind",
        text="How is the model distributed over the ranks?",
        kind="choice",
        choices=tuple(kinds.items()),
        default="ddp",
    )


def _configs(machine: Machine) -> tuple[type, ...]:
    return (*BUILT_IN, *machine.strategies)


def _tag(config: type) -> str:
    return str(attrs.fields_dict(config)["kind"].default)


def _native(answers: Answers) -> bool:
    return answers["launch.launcher"] == "native"


def _default(path: str) -> Any:
    """The type of the field at a path in the launch spec or the plan; None deeper inside."""
    first, _, rest = path.partition(".")
    fields = attrs.fields_dict(LaunchSpec if first == "launch" else Plan)
    if path in ("plan.strategy.kind", "plan.precision"):
        return {"plan.strategy.kind": "ddp", "plan.precision": "fp32"}[path]
    return fields[rest].default if rest in fields else None


def _choice(question: Question, said: str) -> str:
    names = [name for name, _ in question.choices]
    if said.isdecimal() and 1 <= int(said) <= len(names):
        return names[int(said) - 1]
    if said not in names:
        raise ValueError(f"choose one of {', '.join(names)}, or its number")
    return said


def _yes(_: Question, said: str) -> bool:
    known = {"y": True, "yes": True, "n": False, "no": False}
    if said.lower() not in known:
        raise ValueError("choose yes or no")
    return known[said.lower()]


def _whole(_: Question, said: str) -> int:
    if not said.isdecimal() or len(said) > 9:
        raise ValueError("choose a whole number")
    return int(said)


def _number(_: Question, said: str) -> float | int:
    try:
        value = float(said)
    except ValueError:
        raise ValueError("choose a number, or leave it empty") from None
    if not math.isfinite(value):
        raise ValueError("choose a finite number")
    return int(value) if value.is_integer() else value
