"""Hides what must not be pasted into an issue."""

import os
import re
from collections.abc import Iterable

HIDDEN = "***"
_NAME = re.compile(
    r"(?i)(token|secret|passw|passphrase|_?pwd|jwt|credential|api_?-?key|access_?-?key|"
    r"private_?-?key|auth|signature|cookie|bearer|dsn|(^|[_-])(key|pass|pw|sig|cert)$|[_-]keys?\b)"
)
# Up to the last @, since a password may contain one, or a slash.
_ACCOUNT = re.compile(r"(?<=://)\S*@")
# The query of an address may be a signature.
_QUERY = re.compile(r"(\w://[^\s?#]*)[?#]\S*")
_SHAPE = re.compile(
    r"-----BEGIN .*?(?:-----END [^-]*-----|\Z)"
    r"|\beyJ[\w-]+(?:\.[\w-]*)+"
    r"|\b(?:hf_|sk-|gh[opsur]_|github_pat_|xox[abeprs]-|AKIA|ASIA|AIza|ya29\.|glpat-|npm_|pypi-|"
    r"dckr_pat_|wandb_v1_)[\w-]{8,}",
    re.DOTALL,
)
_OPTION = re.compile(r"--?[a-z][a-z0-9_.-]{0,39}")
# Parts of values that cannot be secrets: numbers, versions, SLURM's counts, identifiers of GPUs,
# network interfaces, and the words below.
_PLAIN = re.compile(
    r"[-+]?\d{1,9}(\.\d{1,6}){0,3}%?|\d{1,9}[kmgt]i?b?|x\d{1,6}|0x[\da-f]{1,8}"
    r"|(gpu|mig)-[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}"
    r"|(lo|eth|ens|eno|enp\d{1,3}s|ib|ibp|ibs|hsn|bond|br|docker|mlx\d_|efa|rdmap|wlan)\d{0,3}"
    r"|cuda:\d{1,3}|sm_?\d{2,3}a?|",
    re.IGNORECASE,
)
_CUT = re.compile(r"[\s,;:=|+^/*@\[\](){}\"'-]+")
_LISTED = (
    "abort alloc all auto backend backends balanced binary block bootstrap call cma coll collnet "
    "compact conf core cores cpu cuda cudagraphs cuda_copy cuda_ipc cxi default detail direct "
    "disable disabled distributed dynamic dynamo efa enable enabled env error exec expandable "
    "expandable_segments false fatal fine garbage_collection_threshold gdr gloo gpu granularity "
    "graph "
    "guided hip hns host ib inductor info init ipc ipv4 ipv6 level ll ll128 loc local localhost "
    "master max_split_size_mb mpi native nccl neuron net net_offload never no nodes node none null "
    "numa nvl nvls off ofi on outputs p2p pass passive phb pix plain posix proxy psm2 psm3 pxb rc "
    "recompiles respect ring rocm roundup_power2_divisions scatter sched self shm simple socket "
    "sockets spread static sys tcp thread threads tiling torch tpu trace tree true tuning ucc ucx "
    "ud udp uct verbs version warn warning xla xpu yes active "
)
_WORDS = frozenset(_LISTED.split())


def hidden(name: str, value: str, *, home: str = "") -> str:
    """A fact as it may be shown: secrets are starred, the home folder is ~.

    For facts that fxtrain gathered itself; values that the user has set go through `shown`.

    Args:
        name: Name of the value; names typical of secrets hide all of it.
        value: The text. The account and the query of addresses are starred, and so are keys, web
            tokens and tokens of known services.
        home: The user's home folder, which often contains their name.

    Example:
        >>> from fxtrain.diagnosis import hidden
        >>> hidden("HF_TOKEN", "abc"), hidden("PROXY", "http://me:pw@host/x?key=1")
        ('***', 'http://***@host/x?***')
    """
    if _NAME.search(name) and value:
        return HIDDEN
    text = _QUERY.sub(rf"\1?{HIDDEN}", _ACCOUNT.sub(f"{HIDDEN}@", _SHAPE.sub(HIDDEN, value)))
    return text.replace(home, "~") if len(home) > 1 else text


def shown(name: str, value: str, *, home: str = "") -> str:
    """A value that a user has set, if it cannot be a secret; otherwise stars.

    It cannot be one if its name is not typical of a secret, and it consists of numbers, versions,
    network interfaces, identifiers of GPUs and words that torch, NCCL and the like know, or of one
    or several existing paths separated by colons.

    Example:
        >>> from fxtrain.diagnosis import shown
        >>> shown("NCCL_SOCKET_IFNAME", "^lo,docker0"), shown("NCCL_X", "hunter2")
        ('^lo,docker0', '***')
    """
    if not value:
        return value
    if _NAME.search(name) or not (_is_plain(value) or _are_paths(value)):
        return HIDDEN
    return hidden(name, value, home=home)


def hidden_words(words: Iterable[str], *, home: str = "") -> list[str]:
    """Arguments of a program: names of options, and values that cannot be secrets.

    Example:
        >>> from fxtrain.diagnosis import hidden_words
        >>> hidden_words(["--lr", "0.1", "--api-key=7", "me@host"])
        ['--lr', '0.1', '--api-key=***', '***']
    """
    said: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if _OPTION.fullmatch(name) is None:
            said.append(shown(option, word, home=home))
            option = ""
        elif equals:
            said.append(f"{name}={shown(name, value, home=home)}")
        else:
            said.append(word)
            option = word
    return said


def _is_plain(value: str) -> bool:
    return all(
        _PLAIN.fullmatch(part) is not None or part.lower() in _WORDS for part in _CUT.split(value)
    )


def _are_paths(value: str) -> bool:
    return all(os.path.exists(part) for part in value.split(os.pathsep) if part)
