"""Records: every setting, as a value."""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.state.batch import Batch, Report, Weighted
from fxtrain.state.context import Comm, CommState, DistContext
from fxtrain.state.converters import Change, diff, fingerprint, structure, unstructure
from fxtrain.state.deepspeed import DeepSpeed, FromConfig, from_config
from fxtrain.state.dry_runs import DryRun, Memory, Operator, Problem, Traffic
from fxtrain.state.files import dumps, loads, read_plan, read_record, write_plan, write_record
from fxtrain.state.keys import Key
from fxtrain.state.mesh import Mesh
from fxtrain.state.placement import Offload, Placement, Unit
from fxtrain.state.plan import Compile, Data, Plan, Profile
from fxtrain.state.position import Position
from fxtrain.state.precision import (
    MX,
    TE,
    Bnb4,
    Bnb8,
    Float8,
    LossScale,
    Precision,
    Quantize,
    Recipe,
    Torchao,
)
from fxtrain.state.registry import Config
from fxtrain.state.strategy import (
    MicroBatch,
    Round,
    Strategy,
    UpdateResult,
    UpdateSpec,
    WeightedLoss,
    unsupported,
)
from fxtrain.state.strategy_configs import (
    CP,
    DDP,
    FSDP,
    PP,
    TP,
    XLA,
    CommHook,
    DiLoCo,
    LocalSGD,
    PowerSGD,
    Single,
    Style,
    round_ends,
    token_ranges,
)
from fxtrain.state.window import (
    AccumulationWindow,
    FileTensor,
    FlatShard,
    ModelState,
    ModelStatus,
    StateReader,
    TensorIndex,
    Weight,
)
from fxtrain.state.wrapped import Wrapped

if TYPE_CHECKING:
    from fxtrain._extensions import DEVICES, Device, read_device

__all__ = [
    "AccumulationWindow",
    "Batch",
    "Bnb4",
    "Bnb8",
    "CP",
    "Change",
    "Comm",
    "CommHook",
    "CommState",
    "Compile",
    "Config",
    "DDP",
    "DEVICES",
    "Data",
    "DeepSpeed",
    "Device",
    "DiLoCo",
    "DistContext",
    "DryRun",
    "FSDP",
    "FileTensor",
    "FlatShard",
    "Float8",
    "FromConfig",
    "Key",
    "LocalSGD",
    "LossScale",
    "MX",
    "Memory",
    "Mesh",
    "MicroBatch",
    "ModelState",
    "ModelStatus",
    "Offload",
    "Operator",
    "PP",
    "Placement",
    "Plan",
    "Position",
    "PowerSGD",
    "Precision",
    "Problem",
    "Profile",
    "Quantize",
    "Recipe",
    "Report",
    "Round",
    "Single",
    "StateReader",
    "Strategy",
    "Style",
    "TE",
    "TP",
    "TensorIndex",
    "Torchao",
    "Traffic",
    "Unit",
    "UpdateResult",
    "UpdateSpec",
    "Weight",
    "Weighted",
    "WeightedLoss",
    "Wrapped",
    "XLA",
    "diff",
    "dumps",
    "fingerprint",
    "from_config",
    "loads",
    "read_device",
    "read_plan",
    "read_record",
    "round_ends",
    "structure",
    "token_ranges",
    "unstructure",
    "unsupported",
    "write_plan",
    "write_record",
]
__getattr__ = _extensions.offers(__name__, __all__)
__dir__ = __all__.copy  # for completion
