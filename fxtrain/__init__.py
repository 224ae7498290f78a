"""Distributed PyTorch training loops made of values and functions.

Names load on first use, so that the command line can answer without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fxtrain._version import __version__ as __version__

if TYPE_CHECKING:
    from fxtrain import big as big
    from fxtrain import checkpoint as checkpoint
    from fxtrain import data as data
    from fxtrain import errors as errors
    from fxtrain import experts as experts
    from fxtrain import interop as interop
    from fxtrain import meters as meters
    from fxtrain import ops as ops
    from fxtrain import profiling as profiling
    from fxtrain import quality as quality
    from fxtrain import replicas as replicas
    from fxtrain import state as state
    from fxtrain import testing as testing
    from fxtrain import trackers as trackers
    from fxtrain import tuning as tuning
    from fxtrain.backends import gathered as gathered
    from fxtrain.backends import unwrap as unwrap
    from fxtrain.backends import weights as weights
    from fxtrain.backends import wrap as wrap
    from fxtrain.backends.deepspeed import zero_init as zero_init
    from fxtrain.checkpoint import latest as latest
    from fxtrain.checkpoint import restore as restore
    from fxtrain.checkpoint import save as save
    from fxtrain.data import Sharded as Sharded
    from fxtrain.data import batch as batch
    from fxtrain.data import shard as shard
    from fxtrain.data import tokens as tokens
    from fxtrain.errors import CheckpointError as CheckpointError
    from fxtrain.errors import CollectiveError as CollectiveError
    from fxtrain.errors import FxError as FxError
    from fxtrain.errors import PlanError as PlanError
    from fxtrain.launchers import given_plan as given_plan
    from fxtrain.launchers.function import launch as launch
    from fxtrain.loop import EMA as EMA
    from fxtrain.loop import EarlyStopping as EarlyStopping
    from fxtrain.loop import Mean as Mean
    from fxtrain.loop import StepFns as StepFns
    from fxtrain.loop import ema as ema
    from fxtrain.loop import evaluate as evaluate
    from fxtrain.loop import fit as fit
    from fxtrain.loop import release as release
    from fxtrain.loop import step as step
    from fxtrain.loop import update as update
    from fxtrain.models import export as export
    from fxtrain.models import load_model as load_model
    from fxtrain.ops import close as close
    from fxtrain.ops import detect as detect
    from fxtrain.profiling import dry_run as dry_run
    from fxtrain.profiling import profile as profile
    from fxtrain.state import CP as CP
    from fxtrain.state import DDP as DDP
    from fxtrain.state import FSDP as FSDP
    from fxtrain.state import MX as MX
    from fxtrain.state import PP as PP
    from fxtrain.state import TE as TE
    from fxtrain.state import TP as TP
    from fxtrain.state import XLA as XLA
    from fxtrain.state import Batch as Batch
    from fxtrain.state import Bnb4 as Bnb4
    from fxtrain.state import Bnb8 as Bnb8
    from fxtrain.state import CommHook as CommHook
    from fxtrain.state import Compile as Compile
    from fxtrain.state import Data as Data
    from fxtrain.state import DeepSpeed as DeepSpeed
    from fxtrain.state import DiLoCo as DiLoCo
    from fxtrain.state import DistContext as DistContext
    from fxtrain.state import Float8 as Float8
    from fxtrain.state import LocalSGD as LocalSGD
    from fxtrain.state import LossScale as LossScale
    from fxtrain.state import Mesh as Mesh
    from fxtrain.state import Offload as Offload
    from fxtrain.state import Plan as Plan
    from fxtrain.state import Position as Position
    from fxtrain.state import PowerSGD as PowerSGD
    from fxtrain.state import Precision as Precision
    from fxtrain.state import Profile as Profile
    from fxtrain.state import Report as Report
    from fxtrain.state import Single as Single
    from fxtrain.state import Style as Style
    from fxtrain.state import Torchao as Torchao
    from fxtrain.state import Weighted as Weighted
    from fxtrain.state import Wrapped as Wrapped
    from fxtrain.state import diff as diff
    from fxtrain.state import fingerprint as fingerprint
    from fxtrain.state import from_config as from_config
    from fxtrain.state import read_plan as read_plan
    from fxtrain.state import write_plan as write_plan
    from fxtrain.trackers import JsonLines as JsonLines
    from fxtrain.trackers import MLflow as MLflow
    from fxtrain.trackers import TensorBoard as TensorBoard
    from fxtrain.trackers import WandB as WandB
    from fxtrain.trackers import track as track

_HOMES = {
    "fxtrain.errors": "CheckpointError CollectiveError FxError PlanError",
    "fxtrain.backends": "gathered unwrap weights wrap",
    "fxtrain.backends.deepspeed": "zero_init",
    "fxtrain.checkpoint": "latest restore save",
    "fxtrain.data": "Sharded batch shard tokens",
    "fxtrain.launchers": "given_plan",
    "fxtrain.launchers.function": "launch",
    "fxtrain.loop": "EMA EarlyStopping Mean StepFns ema evaluate fit release step update",
    "fxtrain.models": "export load_model",
    "fxtrain.ops": "close detect",
    "fxtrain.profiling": "dry_run profile",
    "fxtrain.state": (
        "Batch Bnb4 Bnb8 CP CommHook Compile DDP Data DeepSpeed DiLoCo DistContext FSDP Float8 "
        "LocalSGD LossScale MX Mesh Offload PP Plan Position PowerSGD Precision Profile Report "
        "Single Style TE TP Torchao Weighted Wrapped XLA diff fingerprint from_config read_plan "
        "write_plan"
    ),
    "fxtrain.trackers": "JsonLines MLflow TensorBoard WandB track",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = (
    *("big", "checkpoint", "data", "errors", "experts", "interop", "meters", "ops", "profiling"),
    *("quality", "replicas", "state", "testing", "trackers", "tuning"),
)

__all__ = sorted([*_HOME, "ops", "state"])  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"fxtrain.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'fxtrain' has no attribute {name!r}{_instead_of(name)}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # found once; later look-ups cost nothing
        return value


def _instead_of(name: str) -> str:
    """What to use instead of a name; a question after the nearest, or nothing."""
    if name.startswith("_"):
        return ""
    names = importlib.import_module("fxtrain._other_names")
    homes = (
        home for home in _MODULES if name in importlib.import_module(f"fxtrain.{home}").__all__
    )
    hint = names.call_hint(name)
    if not hint and (home := next(homes, None)):
        hint = f" Use fx.{home}.{name}."
    hint = hint or names.closest(name, __all__)
    return f".{hint}" if hint else ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
