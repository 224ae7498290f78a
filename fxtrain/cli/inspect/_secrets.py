"""What must not be pasted into an issue."""

import re
from collections.abc import Iterable

__all__ = ["hidden", "hidden_words"]

_NAME = re.compile(
    r"(?i)(token|secret|passw|passphrase|credential|api_?-?key|access_?-?key|private_?-?key|auth)"
)
_ACCOUNT = re.compile(r"(?<=://)[^/@\s]+@")
_SHAPE = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|xox[abp]-|AKIA|AIza|glpat-|wandb_v1_)[\w-]{8,}"
)


def hidden(name: str, value: str, *, home: str = "") -> str:
    """A value as it can be shown: secrets are starred, the home folder is ~.

    Args:
        name: What the value is called; names of secrets hide all of it.
        value: The text.
        home: The user's home folder, which often holds their name.

    Example:
        >>> from fxtrain.cli.inspect import hidden
        >>> hidden("HF_TOKEN", "abc"), hidden("PROXY", "http://me:pw@host/x")
        ('***', 'http://***@host/x')
    """
    if _NAME.search(name) and value:
        return "***"
    shown = _SHAPE.sub("***", _ACCOUNT.sub("***@", value))
    return shown.replace(home, "~") if len(home) > 1 else shown


def hidden_words(words: Iterable[str], *, home: str = "") -> list[str]:
    """Arguments of a program as they can be shown: `--api-key x` and `TOKEN=x` lose x."""
    shown: list[str] = []
    last = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            shown.append(f"{name}={hidden(name, value, home=home)}")
        else:
            shown.append(hidden(last if last.startswith("-") else "", word, home=home))
        last = word
    return shown
