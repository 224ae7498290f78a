"""SageMaker: a program that submits a training job through version 3 or 2 of Amazon's SDK."""

import textwrap
from pathlib import PurePath
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import remote_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec, launch_record, number_from

_FILE = "fxtrain-launch/sagemaker.py"
_WITH_GPUS = ("ml.g", "ml.p")
_PROGRAM = '''\
"""Submits a training job. Written by fxtrain launch, which overwrites it on the next call.

Needs: pip install 'fxtrain[sagemaker]'
"""

from importlib.util import find_spec

if find_spec("sagemaker.train"):  # version 3 of the SDK
    from sagemaker.core import image_uris
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.train import ModelTrainer, configs
    from sagemaker.train.distributed import Torchrun

{version_3}
else:
    from sagemaker.pytorch import PyTorch

{version_2}
'''
_ONE_RANK = (
    "Version 2 of SageMaker's SDK starts one rank per accelerator of the machine. Omit --ranks, or "
    "install version 3."
)


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
        max_wait_s: Maximum duration with the wait for spot instances, in seconds; by default
            `max_run_s`, so that a job does not wait.
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
    max_run_s: int | None = attrs.field(default=None, validator=number_from(1))
    max_wait_s: int | None = attrs.field(default=None, validator=number_from(1))
    spot: bool = False
    local: bool = False
    wait: bool = True


class _Code(str):
    """Text of the program; other strings are values in it."""


def sagemaker(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The program that submits the job, on whose machines SageMaker starts torchrun."""
    _check(spec)
    inputs = dict(item.split("=", 1) for item in spec.options.inputs)
    lines = [f"trainer = {_trainer(spec)}"]
    if spec.restarts:  # after a failure of SageMaker's own
        again = _call("configs.RetryStrategy", maximum_retry_attempts=spec.restarts)
        lines.append(f"trainer = trainer.with_retry_strategy({again})")
    channels = [
        _call("configs.InputData", channel_name=name, data_source=source)
        for name, source in inputs.items()
    ]
    given = f"input_data_config=[{', '.join(channels)}], " if channels else ""
    lines.append(f"trainer.train({given}wait={spec.options.wait})")
    if spec.ranks > 1:
        older = [f"raise SystemExit({_ONE_RANK!r})"]
    else:
        fit = f"estimator.fit(inputs={inputs or None}, wait={spec.options.wait})"
        older = [f"estimator = {_estimator(spec)}", fit]
    versions = {"version_3": lines, "version_2": older}
    text = _PROGRAM.format(
        **{name: textwrap.indent("\n".join(code), "    ") for name, code in versions.items()}
    )
    return Invocation(argv=(machine.python, _FILE), files={_FILE: text})


def _trainer(spec: LaunchSpec) -> str:
    options = spec.options
    image = _call(
        "image_uris.retrieve",
        framework="pytorch",
        region=_Code("Session().boto_region_name"),
        version=options.framework_version,
        py_version=options.py_version,
        instance_type=options.instance_type,
        image_scope="training",
    )
    return _call(
        "ModelTrainer",
        role=options.role,
        training_image=options.image_uri or image,
        base_job_name=options.base_job_name,
        hyperparameters=_hyperparameters(spec.args),
        environment=remote_environment(spec),
        training_mode="LOCAL_CONTAINER" if options.local else "SAGEMAKER_TRAINING_JOB",
        source_code=_call(
            "configs.SourceCode",
            source_dir=options.source_dir,
            entry_script=PurePath(spec.target).as_posix(),
        ),
        compute=_call(
            "configs.Compute",
            instance_type=_machine(options),
            instance_count=spec.nodes,
            enable_managed_spot_training=options.spot,
        ),
        # Without a number, as many ranks as there are accelerators.
        distributed=_call("Torchrun", process_count_per_node=spec.ranks if spec.ranks > 1 else 0)
        or _Code("Torchrun()"),
        stopping_condition=_call(
            "configs.StoppingCondition",
            max_runtime_in_seconds=options.max_run_s,
            max_wait_time_in_seconds=_max_wait_s(options),
        ),
        output_data_config=_call("configs.OutputDataConfig", s3_output_path=options.output_path),
        checkpoint_config=_call("configs.CheckpointConfig", s3_uri=options.checkpoints),
    )


def _estimator(spec: LaunchSpec) -> str:
    options = spec.options
    return _call(
        "PyTorch",
        entry_point=PurePath(spec.target).as_posix(),
        source_dir=options.source_dir,
        role=options.role,
        instance_type=_machine(options),
        instance_count=spec.nodes,
        image_uri=options.image_uri,
        framework_version=options.framework_version,
        py_version=options.py_version,
        base_job_name=options.base_job_name,
        output_path=options.output_path,
        checkpoint_s3_uri=options.checkpoints,
        max_run=options.max_run_s,
        max_wait=_max_wait_s(options),
        max_retry_attempts=spec.restarts,
        use_spot_instances=options.spot,
        distribution={"torch_distributed": {"enabled": True}},
        hyperparameters=_hyperparameters(spec.args),
        environment=remote_environment(spec),
    )


def _max_wait_s(options: SageMakerOptions) -> int | None:
    return (options.max_wait_s or options.max_run_s) if options.spot else None


def _machine(options: SageMakerOptions) -> str:
    """The type of machine; that of this one if the container runs here."""
    if options.local:
        return "local_gpu" if options.instance_type.startswith(_WITH_GPUS) else "local"
    return options.instance_type


def _call(name: str, **arguments: Any) -> _Code:
    """A call with those of its arguments that are set; empty without any."""
    words = [
        f"{key}={value if isinstance(value, _Code) else repr(value)}"
        for key, value in arguments.items()
        if value
    ]
    if len(words) < 4:
        return _Code(f"{name}({', '.join(words)})" if words else "")
    lines = textwrap.indent("".join(f"{word},\n" for word in words), "    ")
    return _Code(f"{name}(\n{lines})")


def _check(spec: LaunchSpec) -> None:
    options = spec.options
    missing = [name for name in ("role", "instance_type") if not getattr(options, name)]
    if not (options.image_uri or (options.framework_version and options.py_version)):
        missing.append("image_uri, or framework_version and py_version,")
    if missing:
        raise LaunchError(f"SageMaker needs the options {' and '.join(missing)} to start a job.")
    wait_s, run_s = options.max_wait_s, options.max_run_s
    if wait_s is not None and (not options.spot or wait_s < (run_s or 0)):
        raise LaunchError(
            f"SageMaker(max_wait_s={wait_s}, max_run_s={run_s}, spot={options.spot}): it is the "
            f"time for which a job waits for spot instances and runs. Set spot=true, and at least "
            f"max_run_s; or omit it."
        )
    if spec.module or spec.executable:
        raise LaunchError("SageMaker starts Python scripts only. Write one that calls the program.")


def _hyperparameters(args: tuple[str, ...]) -> dict[str, str]:
    """Arguments as names and values, the form in which SageMaker passes them."""
    hyperparameters: dict[str, str] = {}
    words = list(args)
    while words:
        name, joined, value = words.pop(0).partition("=")
        if not joined and words and not words[0].startswith("--"):
            joined, value = "=", words.pop(0)
        if not joined or len(name) < 3 or not name.startswith("--") or name[2:] in hyperparameters:
            raise LaunchError(
                f"SageMaker passes arguments to the script as --name value only, each once. Change "
                f"{name!r}, such as {name} true."
            )
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
