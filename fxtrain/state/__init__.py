"""Records: every setting, as a value."""

from fxtrain._record import few, shown
from fxtrain.state.batch import Batch, Report, Weighted
from fxtrain.state.context import Comm, CommState, DistContext, check_connected, with_plan
from fxtrain.state.converters import converter_for, fingerprint, structure, unstructure
from fxtrain.state.deepspeed import (
    DeepSpeed,
    FromConfig,
    from_config,
)
from fxtrain.state.differences import Change, diff
from fxtrain.state.dry_runs import PARTS, DryRun, Memory, Problem, Traffic
from fxtrain.state.files import (
    PLAN_VARIABLE,
    dumps,
    loads,
    plan_in,
    read_plan,
    read_record,
    write_plan,
    write_record,
)
from fxtrain.state.mesh import AXES, Mesh, agreed_mesh, axis_groups, read_mesh, resolve_mesh
from fxtrain.state.module_names import check_open
from fxtrain.state.parsing import Format, parse_json, parse_text, unique_keys
from fxtrain.state.placement import (
    DtypeRule,
    Limit,
    Offload,
    Placement,
    Room,
    Unit,
    dtype_of,
    owner_of,
)
from fxtrain.state.plan import Compile, Data, Plan
from fxtrain.state.position import Position
from fxtrain.state.precision import LossScale, Precision
from fxtrain.state.profile import Profile
from fxtrain.state.quantized_weights import Bnb4, Bnb8, Quantize, Torchao
from fxtrain.state.recipes import MX, TE, Float8, Recipe
from fxtrain.state.registry import Config, installed_configs, installed_strategies
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
    round_begins,
    round_ends,
    token_ranges,
)
from fxtrain.state.topology.checks import Topology
from fxtrain.state.topology.environments import read_topology
from fxtrain.state.weight import Location, TensorIndex, Weight
from fxtrain.state.window import AccumulationWindow, ModelStatus

__all__ = [
    "AXES",
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
    "Format",
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
    "PARTS",
    "PLAN_VARIABLE",
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
    "Topology",
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
    "agreed_mesh",
    "axis_groups",
    "check_connected",
    "check_open",
    "converter_for",
    "diff",
    "dtype_of",
    "dumps",
    "few",
    "fingerprint",
    "from_config",
    "installed_configs",
    "installed_strategies",
    "is_alone",
    "loads",
    "owner_of",
    "parse_json",
    "parse_text",
    "plan_in",
    "read_mesh",
    "read_plan",
    "read_record",
    "read_topology",
    "resolve_mesh",
    "round_begins",
    "round_ends",
    "round_of",
    "shown",
    "structure",
    "token_ranges",
    "unique_keys",
    "unstructure",
    "unsupported",
    "with_plan",
    "write_plan",
    "write_record",
]
