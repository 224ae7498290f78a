"""The program that submits a training job to SageMaker.

`python -m fxtrain.launchers.built_in.sagemaker.submit FILE`, with the file that `fxtrain launch
--launcher sagemaker` has written.
"""

import json
import sys
from pathlib import Path

from fxtrain._optional import optional


def main() -> None:
    """Submit the job described by the file in the first argument."""
    told = json.loads(Path(sys.argv[1]).read_text())
    pytorch = optional(
        "sagemaker.pytorch", extra="sagemaker", needed_by="fxtrain launch --launcher sagemaker"
    )
    pytorch.PyTorch(**told["estimator"]).fit(**told["fit"])


if __name__ == "__main__":
    main()
