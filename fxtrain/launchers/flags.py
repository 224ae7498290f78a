"""The fields of a spec as flags of `fxtrain launch`, in both directions; what each field means."""

import inspect
import re
from typing import Any, Literal, get_args, get_origin

import attrs

from fxtrain._record import members
from fxtrain.launchers.spec import LaunchSpec

_ON_COMMAND_LINE = ("target", "args", "options")  # without a flag
# Flags that are not the name of their field.
_NAMES = {
    "rendezvous_options": "--rendezvous-option",
    "bind": "--numa-binding",
    "executable": "--no-python",
    "module": "-m",
}
_AGAIN = ("rendezvous_options", "env")  # flags that are repeated


def field_docs(cls: type) -> dict[str, str]:
    """What the docstring of a record says about each field, by name."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    pairs = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in pairs}


@attrs.frozen
class Flag:
    """One option of `fxtrain launch`.

    Attributes:
        field: The field of `LaunchSpec` that it sets, or the path of a field of the plan.
        metavar: Name of its value; empty for a switch.
        help: A description.
        flag: The flag on the command line.
        many: "" for one value, "," for several separated by commas, "again" for a repeated flag.
    """

    field: str
    metavar: str
    help: str
    flag: str
    many: str = ""


def _flag(field: "attrs.Attribute[Any]", text: str) -> Flag:
    name = field.name
    kinds = members(field.type)
    choices = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
    many = "again" if name in _AGAIN else "," if get_origin(kinds[0]) is tuple else ""
    if choices:
        metavar = "|".join(choices[0])
    elif name in _AGAIN:
        metavar = "NAME[=VALUE]" if name == "env" else "KEY=VALUE"
    else:
        words = {bool: "", int: "N", float: "SECONDS", str: "TEXT"}
        metavar = words.get(kinds[0], "K,...")
    flag = _NAMES.get(name) or f"--{name.removesuffix('_s').replace('_', '-')}"
    return Flag(name, metavar, text, flag, many)


_DOCS = field_docs(LaunchSpec)
FLAGS: tuple[Flag, ...] = tuple(
    _flag(field, _DOCS.get(field.name, ""))
    for field in attrs.fields(LaunchSpec)
    if field.name not in _ON_COMMAND_LINE
)
PLAN_FLAGS: tuple[Flag, ...] = tuple(
    Flag(f"plan.{name}", metavar, text, flag or f"--{name.replace('_', '-')}")
    for name, metavar, text, flag in (
        ("mesh", "AXIS=N,...", "Ranks per axis, such as shard=4,tensor=2.", ""),
        ("strategy.kind", "KIND", "Such as ddp or fsdp.", "--strategy"),
        ("precision", "NAME", "fp32, bf16, fp16, fp8.", ""),
        ("accumulate", "N", "Micro-batches per optimizer update.", ""),
        ("clip_norm", "X", "Maximum total gradient norm.", ""),
        ("batch", "HOW", "Whether batch sizes are per_rank or global.", ""),
        ("compile", "", "Compile the model.", ""),
    )
)


def flag_words(spec: LaunchSpec) -> tuple[str, ...]:
    """The words after `fxtrain launch` that describe a spec, without the launcher's own options.

    Example:
        >>> from fxtrain.launchers import LaunchSpec, flag_words
        >>> flag_words(LaunchSpec(target="train.py", ranks=2, gpus=["0", "1"], args=["--lr=1"]))
        ('--ranks=2', '--gpus=0,1', '--', 'train.py', '--lr=1')
    """
    defaults = {field.name: field.default for field in attrs.fields(LaunchSpec)}
    words: list[str] = []
    for flag in FLAGS:
        value = getattr(spec, flag.field)
        if value == defaults[flag.field]:
            continue
        values = value if flag.many == "again" else [value]
        texts = (",".join(map(str, each)) if flag.many == "," else each for each in values)
        words += [f"{flag.flag}={text}" for text in texts] if flag.metavar else [flag.flag]
    return (*words, "--", spec.target, *spec.args)
