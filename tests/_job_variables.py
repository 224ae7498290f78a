"""Variables that a job leaves in a shell, which would make of a test a rank of that job."""

import re
from collections.abc import MutableMapping

# Of the launchers that `fxtrain/state/topology.py` reads, of torchrun and Accelerate, of those that
# choose a network or a proxy, and of this library.
_JOB = re.compile(
    r"((LOCAL_|GROUP_|NODE_|CROSS_|ROLE_)?(RANK|(WORLD_)?SIZE)|ROLE_NAME|ROLE_WORLD_SIZE"
    r"|JOB_COMPLETION_INDEX|MASTER_(ADDR|PORT)|TP_SOCKET_IFNAME"
    r"|(ACCELERATE|CCL|CROSS|FSDP|GLOO|I_MPI|MEGASCALE|MEGATRON_LM|MPI|MV2|NCCL|OMPI|OPAL|ORTE"
    r"|PALS|PARALLELISM_CONFIG|PET|PJRT|PMI|PMIX|PRTE|RAY|SAGEMAKER|SLURM|SM|TORCH_NCCL"
    r"|TORCHELASTIC|TORCHRUN|TPU|XLA|FXTRAIN(?!_GPU_))_\w+"
    r"|(?i:(https?|ftp|all|no)_proxy))"
)
# Where the daemons of SLURM are, for the lane that starts them.
_KEPT = ("SLURM_CONF",)


def is_of_a_job(name: str) -> bool:
    """Whether a job or a launcher sets a variable of this name."""
    return _JOB.fullmatch(name) is not None and name not in _KEPT


def remove_job_variables(variables: MutableMapping[str, str]) -> None:
    """Remove what a job or a launcher has set."""
    for name in [*filter(is_of_a_job, variables)]:
        del variables[name]
