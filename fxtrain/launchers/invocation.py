"""What a launch will start: a command line, variables and files, shown before it runs."""

import json
import shlex
from collections.abc import Mapping

import attrs

from fxtrain.errors import escape_unprintable


@attrs.frozen(kw_only=True)
class Invocation:
    """What a launcher will start.

    Attributes:
        argv: The command line, word by word.
        env: Variables to add to the existing ones.
        files: Texts to write first, by path.
    """

    argv: tuple[str, ...] = attrs.field(converter=tuple)
    env: Mapping[str, str] = attrs.field(factory=dict)
    files: Mapping[str, str] = attrs.field(factory=dict)


def show(invocation: Invocation) -> str:
    """The invocation as a person reads it and a shell runs it; files come first.

    Example:
        >>> from fxtrain.launchers import Invocation, show
        >>> show(Invocation(argv=("python", "train.py", "a b"), env={"OMP_NUM_THREADS": "2"}))
        "OMP_NUM_THREADS=2 python train.py 'a b'"
    """
    written = [f"# {path}\n{text.rstrip()}\n" for path, text in invocation.files.items()]
    variables = [f"{name}={_quoted(value)}" for name, value in invocation.env.items()]
    return "\n".join([*written, " ".join([*variables, *map(_quoted, invocation.argv)])])


def _quoted(word: str) -> str:
    """A word for the shell; control characters are escaped as in bash and zsh."""
    if escape_unprintable(word) == word:
        return shlex.quote(word)
    plain = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{''.join(one if escape_unprintable(one) == one else _code(one) for one in plain)}'"


def _code(letter: str) -> str:
    number = ord(letter)
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


def as_json(invocation: Invocation) -> str:
    """The invocation for other programs: an object with argv, env and files.

    Example:
        >>> from fxtrain.launchers import Invocation, as_json
        >>> as_json(Invocation(argv=("true",)))
        '{"argv": ["true"], "env": {}, "files": {}}'
    """
    return json.dumps(attrs.asdict(invocation))
