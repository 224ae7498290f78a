"""Public signatures say what they take: where they say `Any`, it is on a list, with the reason."""

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import attrs

import fxtrain as fx

MODULES = (
    "fxtrain", "fxtrain.big", "fxtrain.checkpoint", "fxtrain.interop", "fxtrain.meters",
    "fxtrain.ops", "fxtrain.state", "fxtrain.testing", "fxtrain.trackers",
)  # fmt: skip

ANY = re.compile(r"\bAny\b")

_FORWARD = "what a user's function or module returns, which its type does not say"
_TREE = "the user's own values"
_JSON = "plain data, as the json module has it"
_STATE = "state dicts of other libraries"
_NATIVE = "an object of another library, or of the user's class"
_RECORD = "fields that differ from one config of a package to another"
_UNTYPED = "the batches of a DataLoader[Any]"
_INNER = "what one strategy, or torch, keeps for itself"

_PLACES = {
    _FORWARD: (
        "StepFns.loss Strategy.forward Strategy.generate Wrapped.generate.return evaluate.return"
    ),
    _TREE: (
        "RankLogger.log.args RankLogger.log.exc_info Report.aux Report.metrics "
        "Restored.extra WeightedLoss.aux fit.extra map.fn Cluster.outcomes.return"
    ),
    _JSON: (
        "Run.state.return RunLog.entries RunLog.starts Start.params "
        "deepspeed_config.return unstructure.return"
    ),
    _STATE: (
        "EMA.state Imported.config Imported.optimizers Imported.others Imported.scaler "
        "Imported.schedulers ModelState.values StateReader.values "
        "read_checkpoint.args write_megatron.args write_megatron.config"
    ),
    _NATIVE: (
        "Entry.value Run.native.return Sharded.dataset.return Tracker.close "
        "Tracker.flush Tracker.identity Tracker.last_steps Tracker.open Tracker.write "
        "Wrapped.config.return Wrapped.engine Wrapped.optimizer Wrapped.scheduler "
        "Wrapped.state_dict.return"
    ),
    _UNTYPED: "shard.return",
    _RECORD: "Plan.strategy from_config.values",
    _INNER: (
        "Comm.store CommState.background_tasks CommState.open_runs CommState.opened_groups "
        "CommState.slots Round.under_way Strategy.fused Strategy.wrap Weight.like "
        "Wrapped.strategy_state"
    ),
}
ALLOWED = {place: reason for reason, places in _PLACES.items() for place in places.split()}


def _parameters(function: Any) -> Iterator[tuple[str, str]]:
    signature = inspect.signature(function)
    for name, one in signature.parameters.items():
        yield name, str(one.annotation)
    yield "return", str(signature.return_annotation)


def _of_function(function: Any) -> Iterator[tuple[str, str]]:
    for one in typing.get_overloads(inspect.unwrap(function)) or [function]:
        yield from _parameters(one)


def _of_class(cls: type) -> Iterator[tuple[str, str]]:
    fields = {field.name: field for field in attrs.fields(cls)} if attrs.has(cls) else {}
    for name, kind in inspect.get_annotations(cls).items():
        if not name.startswith("_"):
            yield name, str(kind)
    for name, field in fields.items():
        convert = field.converter
        if inspect.isfunction(convert) and convert.__module__ != "fxtrain._record":
            first, *_ = _parameters(convert)
            yield name, first[1]
    for name, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            for parameter, kind in _of_function(function):
                yield f"{name}.{parameter}", kind


def with_any() -> set[str]:
    """Every place of a public signature that says `Any`."""
    found: set[str] = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                value = getattr(value, name, value)
            if not getattr(value, "__module__", "").startswith("fxtrain"):
                continue
            if inspect.isclass(value):
                places = _of_class(value)
            elif inspect.isroutine(value):
                places = _of_function(value)
            else:
                continue
            found |= {f"{value.__qualname__}.{place}" for place, kind in places if ANY.search(kind)}
    return found


def test_any_is_only_where_a_reason_is_given():
    assert with_any() == set(ALLOWED)


def test_a_plan_takes_what_its_fields_are():
    """The constructor that type checkers read has the fields of the record, in its order."""
    source = inspect.getsource(inspect.getmodule(fx.Plan)).partition("        def __init__(")[2]
    names = re.findall(r"^            (\w+): ", source, re.MULTILINE)
    assert names == [field.name for field in attrs.fields(fx.Plan)]
    for field in attrs.fields(fx.Plan):
        given = re.search(rf"^            {field.name}: .* = (.*),$", source, re.MULTILINE)
        assert given is not None
        assert given[1] == "..." or eval(given[1]) == field.default
