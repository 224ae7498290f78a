"""Kubernetes: a JobSet whose pods each run one native launcher."""

import json
import re
from pathlib import PurePath
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import PER_NODE, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.spec import (
    Invocation,
    LaunchSpec,
    each,
    flag_words,
    launch_record,
    name_values,
    number_from,
)

_label = each(
    re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?").fullmatch,
    expected="lower-case letters, digits and -, at most 52",
)
_secret = each(
    re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?").fullmatch, expected="the name of a Secret"
)
_NODES = "node"  # name of the one group of pods
_PORT = "29500"  # of the first pod, through which the ranks connect


@launch_record
class KubernetesOptions:
    """The pods of a run.

    Attributes:
        image: The container image, which contains fxtrain and the program.
        name: Name of the object; by default the program's.
        namespace: Its namespace.
        gpus: Accelerators of each pod.
        gpu_resource: The cluster's name for them.
        cpu: CPUs of each pod, such as 8.
        memory: Memory of each pod, such as 64Gi.
        shared_memory: Size of /dev/shm, which loader workers and NCCL use.
        folder: Working folder of the program in the image.
        python: The interpreter in the image.
        claims: CLAIM:PATH of volumes, one each.
        node_selector: LABEL=VALUE of the machines on which pods may run, one each.
        secrets: Names of Secrets whose keys become variables of the ranks, one each; values of
            `--env` are readable in the manifest and in the cluster.
        service_account: Account of the pods.
    """

    image: str = ""
    name: str = attrs.field(default="", validator=_label)
    namespace: str = attrs.field(default="", validator=_label)
    gpus: int = attrs.field(default=0, validator=number_from(0))
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str = ""
    memory: str = ""
    shared_memory: str = ""
    folder: str = ""
    python: str = "python"
    claims: tuple[str, ...] = attrs.field(
        default=(), validator=each(re.compile(r"[^:]+:/.*").fullmatch, expected="CLAIM:/PATH")
    )
    node_selector: tuple[str, ...] = attrs.field(
        default=(), validator=each(re.compile(r"[^=]+=.*").fullmatch, expected="LABEL=VALUE")
    )
    secrets: tuple[str, ...] = attrs.field(default=(), validator=_secret)
    service_account: str = ""


def kubernetes(spec: LaunchSpec, machine: Machine) -> Invocation:
    """A manifest in JSON, which is also valid YAML, and the command that submits it."""
    options = spec.options
    if not options.image:
        raise LaunchError(
            "On Kubernetes, the program runs in a container. Set the option image to the name of "
            "an image that contains it and fxtrain."
        )
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(spec.target).stem.lower())[:40].strip("-")
    name = options.name or stem or "train"
    job = {
        "parallelism": spec.nodes,
        "completions": spec.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(spec, name)},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _set({"name": name, "namespace": options.namespace}),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": spec.restarts},
            "replicatedJobs": [{"name": _NODES, "replicas": 1, "template": {"spec": job}}],
        },
    }
    file = f"fxtrain-launch/{name}.json"
    text = json.dumps(manifest, indent=2) + "\n"
    return Invocation(argv=("kubectl", "apply", "-f", file), files={file: text})


def _pod(spec: LaunchSpec, name: str) -> dict[str, Any]:
    options = spec.options
    volumes, mounts = _volumes(options)
    gpus = str(options.gpus) if options.gpus else ""
    sizes = {"cpu": options.cpu, "memory": options.memory, options.gpu_resource: gpus}
    container = {
        "name": "train",
        "image": options.image,
        "command": [options.python, "-m", "fxtrain", "launch"],
        "args": _arguments(spec, name),
        "env": [{"name": k, "value": _literal(v)} for k, v in name_values(spec.env).items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in options.secrets],
        "resources": {"limits": _set(sizes)},
        "workingDir": options.folder,
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": options.service_account,
        "nodeSelector": name_values(options.node_selector),
        "containers": [_set(container)],
        "volumes": volumes,
    }
    return _set(pod)


def _arguments(spec: LaunchSpec, name: str) -> list[str]:
    """Arguments of the native launcher: those of the spec, and the pod's number.

    The first pod is found by the name that JobSet gives it.
    """
    inside = attrs.evolve(spec, launcher="native", options=None, env=(), restarts=0)
    words = [_literal(word) for word in flag_words(inside)]
    if spec.nodes == 1:
        return words
    node, address = "$(JOB_COMPLETION_INDEX)", f"{name}-{_NODES}-0-0.{name}"
    return [f"--node-rank={node}", f"--main-address={address}", f"--main-port={_PORT}", *words]


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _literal(text: str) -> str:
    """Escape $: Kubernetes replaces $(NAME) in arguments and values, and $$ by $."""
    return text.replace("$", "$$")


def _volumes(options: KubernetesOptions) -> tuple[list[Any], list[Any]]:
    volumes: list[Any] = []
    mounts: list[Any] = []
    for number, claim in enumerate(options.claims):
        source, path = claim.split(":", 1)
        volumes.append({"name": f"data-{number}", "persistentVolumeClaim": {"claimName": source}})
        mounts.append({"name": f"data-{number}", "mountPath": path})
    if options.shared_memory:
        size = {"medium": "Memory", "sizeLimit": options.shared_memory}
        volumes.append({"name": "shm", "emptyDir": size})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return volumes, mounts


KUBERNETES = Launcher(
    name="kubernetes",
    help="Kubernetes pods, as a JobSet",
    invocation=kubernetes,
    options=KubernetesOptions,
    uses=PER_NODE,
    here=False,
)
