"""A machine and specs to launch on it."""

from typing import Any

from fxtrain.launchers import LaunchSpec, Machine, SageMakerOptions

HERE = Machine(python="python", cores=range(8), numa=((0, 1, 2, 3), (4, 5, 6, 7)), port=4711)
SAGEMAKER = SageMakerOptions(
    role="me", instance_type="ml.p4d.24xlarge", framework_version="2.5", py_version="py311",
    spot=True, max_run_s=60, inputs=("train=s3://b/d",), wait=False,
)  # fmt: skip
VALUE = "s3cr3t-value"  # of a variable, which no message and no file for others may show


def spec_of(launcher: str = "native", **fields: Any) -> LaunchSpec:
    return LaunchSpec(target="train.py", launcher=launcher, **fields)
