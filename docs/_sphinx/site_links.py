"""Addresses of what other projects document, without a network.

torch's inventory is 200 kB and transformers has none, so the names that fxtrain's documentation
mentions are listed here. Needs no Sphinx.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["TORCH", "address_of"]

_ROOT = "https://docs.pytorch.org/docs/stable/"
_OWN_PAGE = (
    "torch.Generator torch.compile torch.no_grad torch.nn.Linear torch.nn.Module "
    "torch.nn.SyncBatchNorm torch.nn.parallel.DistributedDataParallel "
    "torch.nn.utils.clip_grad_norm_ torch.nn.utils.get_total_norm torch.optim.AdamW "
    "torch.optim.SGD torch.optim.lr_scheduler.LRScheduler "
    "torch.optim.lr_scheduler.CosineAnnealingLR torch.use_deterministic_algorithms"
)
_PAGES = (
    ("tensors", "torch.Tensor"),
    ("tensor_attributes", "torch.device torch.dtype"),
    ("size", "torch.Size"),
    ("amp", "torch.autocast"),
    ("optim", "torch.optim.Optimizer"),
    ("data", "torch.utils.data.DataLoader torch.utils.data.Dataset"),
    ("checkpoint", "torch.utils.checkpoint.checkpoint"),
    ("distributed", "torch.distributed.ProcessGroup torch.distributed.all_reduce"),
    ("distributed.tensor", "torch.distributed.tensor.DTensor"),
    ("distributed.fsdp.fully_shard", "torch.distributed.fsdp.fully_shard"),
    ("distributed.optim", "torch.distributed.optim.ZeroRedundancyOptimizer"),
    ("autograd", "torch.autograd.set_detect_anomaly"),
)

# The address of each name.
TORCH: Mapping[str, str] = MappingProxyType(
    {name: f"{_ROOT}generated/{name}.html#{name}" for name in _OWN_PAGE.split()}
    | {name: f"{_ROOT}{page}.html#{name}" for page, names in _PAGES for name in names.split()}
    | {
        # Names without an anchor of their own.
        "torch.amp.GradScaler": f"{_ROOT}amp.html#gradient-scaling",
        "torch.optim.swa_utils.AveragedModel": (f"{_ROOT}optim.html#weight-averaging-swa-and-ema"),
        "torch.distributed.checkpoint": f"{_ROOT}distributed.checkpoint.html",
        "torch.distributed.pipelining": f"{_ROOT}distributed.pipelining.html",
        "torch.nn.functional": f"{_ROOT}nn.functional.html",
    }
)
# Names as pages write them, without their package.
_SHORT = ("DataLoader", "DistributedDataParallel", "DTensor", "ZeroRedundancyOptimizer")
_BY_SHORT = {name: next(one for one in TORCH if one.endswith(f".{name}")) for name in _SHORT}


def address_of(name: str) -> str | None:
    """Where a name of torch is documented, if it is known.

    Args:
        name: As code or prose has it, perhaps with arguments: `torch.compile(net)`.
    """
    word = name.partition("(")[0]
    return TORCH.get(_BY_SHORT.get(word, word))
