"""The program that submits a training job to SageMaker.

`python -m fxtrain.launchers.built_in.sagemaker.submit FILE`, with the file that `fxtrain launch
--launcher sagemaker` has written. The installed version of the SDK decides which of its arguments
are used.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fxtrain._optional import optional
from fxtrain.errors import LaunchError

_NEEDED_BY = "fxtrain launch --launcher sagemaker"
# Arguments of `ModelTrainer` that are objects of other classes.
_PARTS = {
    "SourceCode": "source_code",
    "Compute": "compute",
    "StoppingCondition": "stopping_condition",
    "OutputDataConfig": "output_data_config",
    "CheckpointConfig": "checkpoint_config",
}


def main() -> None:
    """Submit the job described by the file in the first argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    optional("sagemaker", extra="sagemaker", needed_by=_NEEDED_BY)
    if find_spec("sagemaker.train"):
        train_job(job)
    else:
        fit_job(job)


def fit_job(job: dict[str, Any]) -> None:
    """Submit it through version 2: an estimator."""
    if job["ranks"] > 1:
        raise LaunchError(
            f"LaunchSpec(ranks={job['ranks']}): version 2 of SageMaker's SDK starts one rank per "
            f"accelerator of the machine. Omit ranks, or install version 3."
        )
    pytorch = optional("sagemaker.pytorch", extra="sagemaker", needed_by=_NEEDED_BY)
    estimator = pytorch.PyTorch(**job["estimator"])
    estimator.fit(inputs=job["inputs"] or None, wait=job["wait"])


def train_job(job: dict[str, Any]) -> None:
    """Submit it through version 3: a `ModelTrainer`."""
    arguments = job["trainer"]
    train, configs, distributed = (
        importlib.import_module(f"sagemaker.train{name}")
        for name in ("", ".configs", ".distributed")
    )
    parts = {
        field: getattr(configs, name)(**arguments[name])
        for name, field in _PARTS.items()
        if name in arguments
    }
    image = {} if "image" not in arguments else {"training_image": _image(arguments["image"])}
    trainer = train.ModelTrainer(
        **arguments["ModelTrainer"],
        **image,
        **parts,
        distributed=distributed.Torchrun(**arguments["Torchrun"]),
    )
    if "RetryStrategy" in arguments:
        trainer = trainer.with_retry_strategy(configs.RetryStrategy(**arguments["RetryStrategy"]))
    inputs = [
        configs.InputData(channel_name=name, data_source=source)
        for name, source in job["inputs"].items()
    ]
    trainer.train(input_data_config=inputs or None, wait=job["wait"])


def _image(arguments: dict[str, Any]) -> str:
    """SageMaker's own image for some versions, in the region of the session."""
    core = importlib.import_module("sagemaker.core.image_uris")
    session = importlib.import_module("sagemaker.core.helper.session_helper").Session()
    return core.retrieve(region=session.boto_region_name, **arguments)


if __name__ == "__main__":
    main()
