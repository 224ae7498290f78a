"""SageMaker: the arguments of a training job, submitted through Amazon's SDK."""

import json
from pathlib import PurePath
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import remote_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec, count, launch_record

_FILE = "fxtrain-launch/sagemaker.json"
_WITH_GPUS = ("ml.g", "ml.p")


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
        checkpoints: Where SageMaker copies `/opt/ml/checkpoints` to, and from which it fills that
            folder when the job starts again, such as s3://bucket/path.
        inputs: NAME=s3://... of data channels, one each.
        max_run_s: Maximum duration, in seconds.
        spot: Use spot instances, which may be interrupted.
        local: Run the container with Docker on this machine.
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
    checkpoints: str = ""
    inputs: tuple[str, ...] = ()
    max_run_s: int | None = attrs.field(default=None, validator=count(1))
    spot: bool = False
    local: bool = False
    wait: bool = True


def sagemaker(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The job's arguments for both versions of the SDK, and the program that submits them.

    Raises:
        LaunchError: role, machine or image are missing, or SageMaker cannot pass the arguments.
    """
    _check(spec)
    options = spec.options
    job = {
        "ranks": spec.ranks,
        "inputs": dict(item.split("=", 1) for item in options.inputs),
        "wait": options.wait,
        "estimator": estimator_arguments(spec),
        "trainer": trainer_arguments(spec),
    }
    return Invocation(
        argv=(machine.python, "-m", "fxtrain.launchers.built_in.sagemaker.submit", _FILE),
        files={_FILE: json.dumps(job, indent=2) + "\n"},
    )


def estimator_arguments(spec: LaunchSpec) -> dict[str, Any]:
    """Keyword arguments for `sagemaker.pytorch.PyTorch` of version 2 of the SDK.

    It starts torchrun in the job, with one rank for each accelerator of a machine.
    """
    options = spec.options
    arguments = {
        "entry_point": PurePath(spec.target).as_posix(),
        "source_dir": options.source_dir,
        "role": options.role,
        "instance_type": _machine(options),
        "instance_count": spec.nodes,
        "image_uri": options.image_uri,
        "framework_version": options.framework_version,
        "py_version": options.py_version,
        "base_job_name": options.base_job_name,
        "output_path": options.output_path,
        "checkpoint_s3_uri": options.checkpoints,
        "max_run": options.max_run_s,
        "max_wait": options.max_run_s if options.spot else None,
        "max_retry_attempts": spec.restarts or None,
        "use_spot_instances": options.spot,
        "distribution": {"torch_distributed": {"enabled": True}},
        "hyperparameters": _hyperparameters(spec.args),
        "environment": remote_environment(spec),
    }
    return _set(arguments)


def trainer_arguments(spec: LaunchSpec) -> dict[str, Any]:
    """By class of version 3 of the SDK, its keyword arguments; those of `ModelTrainer` first.

    `Torchrun` starts torchrun in the job, `RetryStrategy` starts the job again after a failure of
    SageMaker's. `image` has the arguments of `image_uris.retrieve`, where no image is named.
    """
    options = spec.options
    trainer = {
        "role": options.role,
        "training_image": options.image_uri,
        "base_job_name": options.base_job_name,
        "hyperparameters": _hyperparameters(spec.args),
        "environment": remote_environment(spec),
        "training_mode": "LOCAL_CONTAINER" if options.local else "SAGEMAKER_TRAINING_JOB",
    }
    image = {
        "framework": "pytorch",
        "version": options.framework_version,
        "py_version": options.py_version,
        "instance_type": options.instance_type,
        "image_scope": "training",
    }
    arguments = {
        "ModelTrainer": _set(trainer),
        "SourceCode": {
            "source_dir": options.source_dir,
            "entry_script": PurePath(spec.target).as_posix(),
        },
        "Compute": _set(
            {
                "instance_type": _machine(options),
                "instance_count": spec.nodes,
                "enable_managed_spot_training": options.spot,
            }
        ),
        "Torchrun": _set({"process_count_per_node": spec.ranks if spec.ranks > 1 else None}),
        "StoppingCondition": _set(
            {
                "max_runtime_in_seconds": options.max_run_s,
                "max_wait_time_in_seconds": options.max_run_s if options.spot else None,
            }
        ),
        "OutputDataConfig": _set({"s3_output_path": options.output_path}),
        "CheckpointConfig": _set({"s3_uri": options.checkpoints}),
        "RetryStrategy": _set({"maximum_retry_attempts": spec.restarts or None}),
        "image": {} if options.image_uri else image,
    }
    # Torchrun() starts as many ranks as there are accelerators.
    return {name: value for name, value in arguments.items() if value or name == "Torchrun"}


def _machine(options: SageMakerOptions) -> str:
    """The type of machine; that of this one if the container runs here."""
    if options.local:
        return "local_gpu" if options.instance_type.startswith(_WITH_GPUS) else "local"
    return options.instance_type


def _set(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that have a value."""
    return {name: value for name, value in arguments.items() if value not in ("", None, False, {})}


def _check(spec: LaunchSpec) -> None:
    options = spec.options
    missing = [name for name in ("role", "instance_type") if not getattr(options, name)]
    if not (options.image_uri or (options.framework_version and options.py_version)):
        missing.append("image_uri, or framework_version and py_version,")
    if missing:
        raise LaunchError(f"SageMaker needs the options {' and '.join(missing)} to start a job.")
    if spec.module or spec.executable:
        raise LaunchError("SageMaker starts Python scripts only. Write one that calls the program.")


def _hyperparameters(args: tuple[str, ...]) -> dict[str, str]:
    """Arguments as names and values, the form in which SageMaker passes them."""
    hyperparameters: dict[str, str] = {}
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
        if name[2:] in hyperparameters:
            raise LaunchError(f"SageMaker passes each argument once, but {name} is given twice.")
        hyperparameters[name[2:]] = value
    return hyperparameters


SAGEMAKER = Launcher(
    name="sagemaker",
    help="a training job of Amazon SageMaker",
    invocation=sagemaker,
    options=SageMakerOptions,
    uses=frozenset({"restarts"}),
    here=False,
)
