"""Records: everything that decides behaviour, as values."""

from fxtrain.state._batch import Batch, Report, Weighted
from fxtrain.state._context import Comm, DistContext, Ledger, check_connected
from fxtrain.state._convert import converter_for, fingerprint, structure, unstructure
from fxtrain.state._deepspeed import DeepSpeed, FromConfig, from_config
from fxtrain.state._diff import Change, diff
from fxtrain.state._dry_run import PARTS, DryRun, Memory, Problem, Traffic
from fxtrain.state._files import dumps, loads, read_plan, write_plan
from fxtrain.state._fsdp import FSDP
from fxtrain.state._launchers import read_topology
from fxtrain.state._local import DiLoCo, LocalSGD, is_alone, round_begins, round_ends
from fxtrain.state._mesh import AXES, Mesh, axis_groups, read_mesh, resolve_mesh
from fxtrain.state._parse import Format, parse_json, parse_text, unique_keys
from fxtrain.state._pipeline import PP
from fxtrain.state._plan import Compile, Data, Plan
from fxtrain.state._position import Position
from fxtrain.state._precision import DTYPES, LossScale, Precision
from fxtrain.state._record import few, shown
from fxtrain.state._sequence import CP, token_ranges
from fxtrain.state._strategies import DDP, CommHook, PowerSGD, Single
from fxtrain.state._strategy import (
    Finish,
    ModelState,
    Outcome,
    Round,
    Saved,
    Share,
    Strategy,
    Stretch,
    Wrapped,
    check_open,
    unsupported,
)
from fxtrain.state._tensor import TP, Style
from fxtrain.state._topology import Topology
from fxtrain.state._weight import Part, Weight
from fxtrain.state._xla import XLA

__all__ = [
    "AXES",
    "Batch",
    "CP",
    "Change",
    "Comm",
    "CommHook",
    "Compile",
    "DDP",
    "DTYPES",
    "Data",
    "DeepSpeed",
    "DiLoCo",
    "DistContext",
    "DryRun",
    "FSDP",
    "Finish",
    "Format",
    "FromConfig",
    "Ledger",
    "LocalSGD",
    "LossScale",
    "Memory",
    "Mesh",
    "ModelState",
    "Outcome",
    "PARTS",
    "PP",
    "Part",
    "Plan",
    "Position",
    "PowerSGD",
    "Precision",
    "Problem",
    "Report",
    "Round",
    "Saved",
    "Share",
    "Single",
    "Strategy",
    "Stretch",
    "Style",
    "TP",
    "Topology",
    "Traffic",
    "Weight",
    "Weighted",
    "Wrapped",
    "XLA",
    "axis_groups",
    "check_connected",
    "check_open",
    "converter_for",
    "diff",
    "dumps",
    "few",
    "fingerprint",
    "from_config",
    "is_alone",
    "loads",
    "parse_json",
    "parse_text",
    "read_mesh",
    "read_plan",
    "read_topology",
    "resolve_mesh",
    "round_begins",
    "round_ends",
    "shown",
    "structure",
    "token_ranges",
    "unique_keys",
    "unstructure",
    "unsupported",
    "write_plan",
]
