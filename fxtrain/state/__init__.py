"""Records: every setting, as a value."""

from fxtrain.state.batch import Batch, Report, Weighted
from fxtrain.state.context import Comm, CommState, DistContext
from fxtrain.state.converters import fingerprint, structure, unstructure
from fxtrain.state.deepspeed import DeepSpeed, FromConfig, from_config
from fxtrain.state.differences import Change, diff
from fxtrain.state.dry_runs import DryRun, Memory, Problem, Traffic
from fxtrain.state.files import dumps, loads, read_plan, read_record, write_plan, write_record
from fxtrain.state.mesh import Mesh
from fxtrain.state.placement import DtypeRule, Limit, Offload, Placement, Room, Unit
from fxtrain.state.plan import Compile, Data, Plan
from fxtrain.state.position import Position
from fxtrain.state.precision import LossScale, Precision
from fxtrain.state.profile import Profile
from fxtrain.state.quantized_weights import Bnb4, Bnb8, Quantize, Torchao
from fxtrain.state.recipes import MX, TE, Float8, Recipe
from fxtrain.state.registry import Config
from fxtrain.state.stored_state import FlatShard, ModelState, StateReader
from fxtrain.state.strategy import (
    Round,
    Strategy,
    UpdateResult,
    UpdateSpec,
    WeightedLoss,
    Wrapped,
    round_of,
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
    is_alone,
    round_ends,
    token_ranges,
)
from fxtrain.state.weight import Location, TensorIndex, Weight
from fxtrain.state.window import AccumulationWindow, ModelStatus

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
    "Data",
    "DeepSpeed",
    "DiLoCo",
    "DistContext",
    "DryRun",
    "DtypeRule",
    "FSDP",
    "FlatShard",
    "Float8",
    "FromConfig",
    "Limit",
    "LocalSGD",
    "Location",
    "LossScale",
    "MX",
    "Memory",
    "Mesh",
    "ModelState",
    "ModelStatus",
    "Offload",
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
    "Room",
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
    "is_alone",
    "loads",
    "read_plan",
    "read_record",
    "round_ends",
    "round_of",
    "structure",
    "token_ranges",
    "unstructure",
    "unsupported",
    "write_plan",
    "write_record",
]
