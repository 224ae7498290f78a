"""SageMaker: the arguments of an estimator, submitted through Amazon's SDK."""

import json
from pathlib import PurePath
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.invocation import Invocation
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import remote_environment
from fxtrain.launchers.spec import LaunchSpec, count, launch_record

_FILE = "fxtrain-launch/sagemaker.json"


@launch_record
class SageMakerOptions:
    """What a training job requests from SageMaker.

    Attributes:
        role: Name of the IAM role of the job.
        instance_type: Type of machine, such as ml.p4d.24xlarge.
        source_dir: Folder to upload, which contains the script.
        image_uri: Container image; by default SageMaker's own for the versions below.
        framework_version: Version of PyTorch in SageMaker's image.
        py_version: Version of Python in it.
        base_job_name: Name of the job, to which a time is appended.
        output_path: Where the job stores its files, such as s3://bucket/path.
        inputs: NAME=s3://... of data channels, one each.
        max_run_s: Maximum duration, in seconds.
        spot: Use spot instances, which may be interrupted.
        wait: Show the output until the job ends.
    """

    role: str = ""
    instance_type: str = ""
    source_dir: str = "."
    image_uri: str = ""
    framework_version: str = ""
    py_version: str = ""
    base_job_name: str = ""
    output_path: str = ""
    inputs: tuple[str, ...] = ()
    max_run_s: int | None = attrs.field(default=None, validator=count(1))
    spot: bool = False
    wait: bool = True


def sagemaker(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The estimator's arguments in a file, and the program that submits them.

    Raises:
        LaunchError: role, machine or image are missing, or SageMaker cannot pass the arguments.

    Example:
        >>> from fxtrain.launchers import LaunchSpec, Machine, SageMakerOptions, sagemaker
        >>> options = SageMakerOptions(role="me", instance_type="ml.g5.xlarge", image_uri="i")
        >>> spec = LaunchSpec(target="train.py", args=("--lr", "0.1"), options=options)
        >>> list(sagemaker(spec, Machine(python="python")).files)
        ['fxtrain-launch/sagemaker.json']
    """
    told = {
        "estimator": estimator_arguments(spec),
        "fit": {
            "inputs": dict(item.split("=", 1) for item in spec.options.inputs) or None,
            "wait": spec.options.wait,
        },
    }
    return Invocation(
        argv=(machine.python, "-m", "fxtrain.launchers.built_in.sagemaker.submit", _FILE),
        files={_FILE: json.dumps(told, indent=2) + "\n"},
    )


def estimator_arguments(spec: LaunchSpec) -> dict[str, Any]:
    """Keyword arguments for `sagemaker.pytorch.PyTorch`, which starts torchrun in the job.

    It starts one rank for each accelerator of a machine.
    """
    options = spec.options
    _check(spec)
    given = {
        "entry_point": PurePath(spec.target).as_posix(),
        "source_dir": options.source_dir,
        "role": options.role,
        "instance_type": options.instance_type,
        "instance_count": spec.nodes,
        "image_uri": options.image_uri,
        "framework_version": options.framework_version,
        "py_version": options.py_version,
        "base_job_name": options.base_job_name,
        "output_path": options.output_path,
        "max_run": options.max_run_s,
        "max_wait": options.max_run_s if options.spot else None,
        "use_spot_instances": options.spot,
        "distribution": {"torch_distributed": {"enabled": True}},
        "hyperparameters": _hyperparameters(spec.args),
        "environment": remote_environment(spec),
    }
    return {name: value for name, value in given.items() if value not in ("", None, False, {})}


def _check(spec: LaunchSpec) -> None:
    options = spec.options
    missing = [name for name in ("role", "instance_type") if not getattr(options, name)]
    if not (options.image_uri or (options.framework_version and options.py_version)):
        missing.append("image_uri, or framework_version and py_version,")
    if missing:
        raise LaunchError(f"SageMaker needs the options {' and '.join(missing)} to start a job.")
    if spec.module or spec.executable:
        raise LaunchError("SageMaker starts Python scripts only. Write one that calls the program.")
    if spec.ranks > 1:
        raise LaunchError(
            f"LaunchSpec(ranks={spec.ranks}): SageMaker starts one rank per accelerator of the "
            f"machine. Omit ranks."
        )


def _hyperparameters(args: tuple[str, ...]) -> dict[str, str]:
    """Arguments as names and values, the form in which SageMaker passes them."""
    found: dict[str, str] = {}
    words = list(args)
    while words:
        name, joined, value = words.pop(0).partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise LaunchError(
                f"SageMaker passes arguments to the script as --name value only, found {name!r}."
            )
        if not joined:
            if not words or words[0].startswith("--"):
                raise LaunchError(
                    f"SageMaker passes arguments to the script as --name value only, but {name} "
                    f"has no value. Give it one, such as {name} true."
                )
            value = words.pop(0)
        if name[2:] in found:
            raise LaunchError(f"SageMaker passes each argument once, but {name} is given twice.")
        found[name[2:]] = value
    return found


SAGEMAKER = Launcher(
    name="sagemaker",
    help="a training job of Amazon SageMaker",
    invocation=sagemaker,
    options=SageMakerOptions,
    here=False,
)
