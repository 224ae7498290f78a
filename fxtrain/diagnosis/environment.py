"""Facts about this machine, without secrets, and problems between the facts of ranks."""

import functools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fxtrain import __version__
from fxtrain._host_memory import available_memory
from fxtrain.errors import ContextError, PlanError
from fxtrain.launchers.config import LaunchConfig, resolve
from fxtrain.state.topology import read_topology

Groups = dict[str, dict[str, str]]

# Beside those that torch lists.
_PACKAGES = (
    "attrs", "cattrs", "safetensors", "click", "rich", "tomlkit", "pyyaml", "cloudpickle",
    "accelerate", "deepspeed", "transformers", "timm", "datasets", "lightning",
    "transformer-engine", "flash-attn", "bitsandbytes", "mpi4py", "ray", "sagemaker", "torch_xla",
)  # fmt: skip

# Variables that change how ranks find each other or how torch behaves.
_VARIABLES = re.compile(
    r"^(CUDA|NVIDIA|HIP|ROCR|ZE|ONEAPI|CCL|NCCL|RCCL|GLOO|UCX|UCC|FI|OMP|MKL|KMP|GOMP|TORCH|"
    r"TORCHELASTIC|PYTORCH|PJRT|XLA|TPU|FXTRAIN|SLURM|OMPI|PMI|PMIX|MPI|MV2|PALS)_"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|"
    r"MASTER_PORT|CUDA_VISIBLE_DEVICES|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_DEFAULT_ENV)$"
)
_TOOL_S = 10.0


def collect(env: Mapping[str, str]) -> Groups:
    """Everything that a bug report needs, by group and name, without secrets.

    Relevant variables and settings are listed by name. Their values are shown if they cannot be
    secrets (see `shown_setting`), and as stars otherwise.

    Args:
        env: Variables of the process; not changed.

    Effects:
        Runs `torch.utils.collect_env`, once a process, which takes a few seconds; and nvidia-smi,
        mpirun and srun if they are installed. Sends nothing.
    """
    torch = import_module("torch")
    home = env.get("HOME", "")
    parts: dict[str, Callable[[], Mapping[str, Any]]] = {
        "torch": _torch_facts,
        "packages": _packages,
        "machine": lambda: _machine(env),
        "topology": lambda: _topology(env),
        "communication": lambda: _communication(torch, env),
        "config": lambda: _config(env),
        # Variables with two underscores set values, which are shown under config.
        "variables": lambda: {
            name: shown_setting(name, env[name], home=home)
            for name in sorted(env)
            if _VARIABLES.search(name) and "__" not in name
        },
    }
    return {
        group: {
            name: str(value) if group == "config" else hidden(name, str(value), home=home)
            for name, value in part().items()
        }
        for group, part in parts.items()
    }


@functools.cache  # slow, and a machine does not change while a command runs
def _torch_facts() -> dict[str, Any]:
    """What torch reports about itself, the system, the processor and the accelerators."""
    facts = import_module("torch.utils.collect_env").get_env_info()._asdict()
    del facts["caching_allocator_config"]  # a variable
    return {name: fact for name, fact in facts.items() if fact not in (None, "N/A")}


def _packages() -> dict[str, Any]:
    facts: dict[str, Any] = {"fxtrain": __version__}
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def _machine(env: Mapping[str, str]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": f"{cores} usable of {os.cpu_count()}",
        "memory": _memory(),
        "shared memory": _free("/dev/shm"),
        "fxtrain command": shutil.which("fxtrain", path=env.get("PATH")) or "not on the PATH",
        "python command": sys.executable,
    }


def _memory() -> str:
    sizes = available_memory()
    free, total, machine = (size / 2**30 for size in sizes)
    if not total:
        return "unknown"
    limited = f", the limit of this container or job on a machine of {machine:.1f} GiB"
    return f"{free:.1f} GiB available of {total:.1f} GiB{limited if total < machine else ''}"


def _free(folder: str) -> str:
    if not Path(folder).is_dir():
        return "none"
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"


def _topology(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        here = read_topology(env)
        place = f"rank {here.rank} of {here.world_size} ({here.launcher})"
    except ContextError as error:
        # Without the values found there.
        names = [name for name in env if re.search(rf"\b{re.escape(name)}\b", str(error))]
        place = f"unreadable: {', '.join(sorted(names))}; see the error of `fx.detect()`"
    facts = {"this process": place}
    if shutil.which("nvidia-smi"):
        facts["links"] = "\n" + _tool("nvidia-smi", "topo", "-m")
    return facts


def _communication(torch: Any, env: Mapping[str, str]) -> dict[str, Any]:
    dist = torch.distributed
    names = ("gloo", "nccl", "xccl", "ucc", "mpi") if dist.is_available() else ()
    there = [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]
    facts: dict[str, Any] = {"back ends": ", ".join(there) or "none"}
    if "nccl" in there:
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["interfaces"] = ", ".join(name for _, name in socket.if_nameindex())
    for tool in ("mpirun", "srun"):
        if shutil.which(tool, path=env.get("PATH")):
            facts[tool] = _tool(tool, "--version").partition("\n")[0]
    return facts


def _config(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        config = resolve(env=env)
    except PlanError as error:
        # Without the values found there, which may be secrets.
        wrong = re.findall(r"^((?:launch|plan)\b[\w.]*): ", str(error), re.MULTILINE)
        names = ", ".join(wrong) or "the file"
        return {"invalid": f"{names}; `fxtrain config check` lists the errors"}
    home = env.get("HOME", "")
    values = config.by_path(set_only=True)
    return {
        "file": hidden("", config.file, home=home) or "none",
        **{path: _setting(config, path, value, home) for path, value in values.items()},
    }


def _setting(config: LaunchConfig, path: str, value: Any, home: str) -> str:
    """A value of a launch file as it may be shown: a choice from a few is not a secret."""
    if path == "launch.env":
        return f"{', '.join(word.partition('=')[0] for word in value)} (values are not shown)"
    if isinstance(value, list | tuple):
        return str([shown_setting(path, str(word), home=home) for word in value])
    if value is None or isinstance(value, bool | int | float) or _is_choice(config, path):
        return str(value)
    return shown_setting(path, str(value), home=home)


def _is_choice(config: LaunchConfig, path: str) -> bool:
    """Whether the field of a record only accepts one of a few words."""
    *owners, name = path.split(".")
    record: Any = config
    for owner in owners:
        record = getattr(record, owner, None)
    if name == "kind" or path == "launch.launcher":  # found in a table
        return record is not None
    kinds = {field.name: field.type for field in getattr(type(record), "__attrs_attrs__", ())}
    kind = kinds.get(name)
    return any(get_origin(member) is Literal for member in (kind, *get_args(kind)))


def _tool(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    output = done.stdout.strip() or done.stderr.strip()
    return output if done.returncode == 0 else f"exit code {done.returncode}: {output}"


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

    For facts that fxtrain gathered itself; values that the user has set go through `shown_setting`.

    Args:
        name: Name of the value; names typical of secrets hide all of it.
        value: The text. The account and the query of addresses are starred, and so are keys, web
            tokens and tokens of known services.
        home: The user's home folder, which often contains their name.
    """
    if _NAME.search(name) and value:
        return HIDDEN
    text = _QUERY.sub(rf"\1?{HIDDEN}", _ACCOUNT.sub(f"{HIDDEN}@", _SHAPE.sub(HIDDEN, value)))
    return text.replace(home, "~") if len(home) > 1 else text


def shown_setting(name: str, value: str, *, home: str = "") -> str:
    """A value that a user has set, if it cannot be a secret; otherwise stars.

    It cannot be one if its name is not typical of a secret, and it consists of numbers, versions,
    network interfaces, identifiers of GPUs and words that torch, NCCL and the like know, or of one
    or several existing paths separated by colons.
    """
    if not value:
        return value
    if _NAME.search(name) or not (_is_plain(value) or _are_paths(value)):
        return HIDDEN
    return hidden(name, value, home=home)


def _is_plain(value: str) -> bool:
    return all(
        _PLAIN.fullmatch(part) is not None or part.lower() in _WORDS for part in _CUT.split(value)
    )


def _are_paths(value: str) -> bool:
    return all(os.path.exists(part) for part in value.split(os.pathsep) if part)


# What must agree, since otherwise ranks run different code, and what to do if it does not.
_MUST_MATCH = {
    **dict.fromkeys(
        ("python", "fxtrain", "torch", "CUDA", "NCCL"), "Install the same version everywhere."
    ),
    "device": "Give each node the same devices, or set launch.cpu.",
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# With larger differences between nodes, logs, file times and certificates are unreliable.
_MAX_CLOCK_SKEW_S = 1.0


def facts_here(env: Mapping[str, str], torch: Any) -> dict[str, Any]:
    """Plain data about this process and its machine.

    Effects:
        Resolves the machine's own name.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "fxtrain": __version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        "interfaces": interfaces,
        "asked": {name: env[name] for name in _INTERFACES if env.get(name)},
        "own_address": _own_address(),
        "device": str(torch.accelerator.current_accelerator(check_available=True) or "cpu"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "time": time.time(),
    }


def fact_problems(facts: Sequence[Mapping[str, Any]], *, nodes: int) -> list[str]:
    """Incompatibilities between ranks, as text, from what `facts_here` returned on each."""
    problems: list[str] = []
    for name, advice in _MUST_MATCH.items():
        hosts: dict[str, set[str]] = {}
        for fact in facts:
            hosts.setdefault(str(fact.get(name, "")), set()).add(str(fact["host"]))
        if len(hosts) > 1:
            values = [f"{value or 'none'} on {_list(hosts[value])}" for value in sorted(hosts)]
            problems.append(f"{name} differs: {', '.join(values)}. {advice}")
    for fact in {str(fact["host"]): fact for fact in facts}.values():
        problems += _interface_problems(fact)
        named = bool(fact.get("asked", {}).get("GLOO_SOCKET_IFNAME"))  # gloo then uses that
        if nodes > 1 and not named and str(fact.get("own_address", "")).startswith("127."):
            problems.append(
                f"{fact['host']} resolves its own name to {fact['own_address']}, where other nodes "
                f"cannot reach it. Set launch.local_address, or correct /etc/hosts."
            )
    return problems


def clock_problems(times: Sequence[float], hosts: Sequence[str]) -> list[str]:
    """Hosts whose clocks differ, from times that were read at the same moment."""
    problems: list[str] = []
    for host, ahead in {host: at - times[0] for host, at in zip(hosts, times, strict=True)}.items():
        if abs(ahead) > _MAX_CLOCK_SKEW_S:
            word = "ahead of" if ahead > 0 else "behind"
            problems.append(
                f"The clock of {host} is {abs(ahead):.1f} s {word} {hosts[0]}. Set the time by NTP "
                f"(timedatectl)."
            )
    return problems


def _interface_problems(fact: Mapping[str, Any]) -> list[str]:
    """Interfaces that a variable names and the machine does not have."""
    there = [str(name) for name in fact.get("interfaces", ())]
    problems: list[str] = []
    for variable, asked in dict(fact.get("asked", {})).items():
        wanted = [name.partition(":")[0] for name in asked.lstrip("=").split(",")]
        # NCCL accepts prefixes, and ^ to exclude; gloo accepts full names.
        exact = asked.startswith("=") or not variable.startswith("NCCL")
        if asked.startswith("^") or any(
            name == interface if exact else name.startswith(interface)
            for interface in wanted
            for name in there
        ):
            continue
        problems.append(
            f"{variable}={asked} on {fact['host']}: no such interface. Available: "
            f"{', '.join(there)}."
        )
    return problems


def _list(hosts: set[str]) -> str:
    shown = sorted(hosts)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
