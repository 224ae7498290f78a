"""Restore a checkpoint at any world size; each rank reads only what it needs."""

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._display import brief
from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.background import CheckpointState
from fxtrain.checkpoint.folders import committed_before, find_checkpoint, latest
from fxtrain.checkpoint.json_values import decode
from fxtrain.checkpoint.manifest import Manifest, kinds_of, packed
from fxtrain.checkpoint.reading import Reader, open_reader
from fxtrain.checkpoint.snapshot import by_name, set_random_state, values_by_name
from fxtrain.checkpoint.storage import Storage, open_storage
from fxtrain.checkpoint.verification import verify
from fxtrain.errors import CheckpointError, FxError
from fxtrain.ops.optimizer_settings import plain_settings, use_script_settings
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.tensor_bytes import DTYPES
from fxtrain.ops.transport.exchange import EMPTY
from fxtrain.ops.transport.pickled import dump, unpickle_all
from fxtrain.state import (
    DistContext,
    Key,
    Plan,
    Position,
    StateReader,
    Wrapped,
    diff,
    structure,
    unstructure,
)
from fxtrain.state.context import check_connected
from fxtrain.state.keys import EXTRA, encode_key

_LOG = logging.getLogger(__name__)
# Where a model is, how it is computed there, and what is recorded: not how it trains.
_PLACING = ("strategy", "mesh", "context", "compile", "profile", "frozen")
_PLACING += ("recompute", "recompute_every", "recompute_keep")


@attrs.frozen(kw_only=True, eq=False)
class Restored:
    """What a checkpoint contains in addition to the models.

    Attributes:
        path: Path of the checkpoint.
        position: Position of the run; resume with `loader.at(position)`.
        extra: The user's state.
        world_size: Number of ranks that saved.
    """

    path: str
    position: Position
    extra: Any = attrs.field(repr=brief)
    world_size: int
    _plans: Mapping[str, Any] = attrs.field(alias="plans", repr=False)

    def plan(self, name: str = "model") -> Plan:
        """The plan that a model was saved under.

        Raises:
            CheckpointError: the checkpoint has no model of that name.
            PlanError: the plan names a strategy that is not installed.
        """
        if name not in self._plans:
            raise CheckpointError(
                f"No model {name!r} in {self.path}; it contains {', '.join(self._plans)}.",
                code="FX603",
            )
        return structure(self._plans[name], Plan)


def restore(
    path: StrPath,
    ctx: DistContext,
    model: Wrapped | Mapping[str, Wrapped],
    *,
    extra: object = None,
    random: bool = True,
    settings: Literal["checkpoint", "script"] = "checkpoint",
) -> Restored:
    """Load a checkpoint into models, and restore the random generators.

    The world size, the mesh and the strategy may differ from those that saved. At the same
    world size the run resumes bit for bit. At another, it resumes with exactly the rows not
    yet seen, and each additional rank gets newly seeded generators.

    Args:
        path: A checkpoint, or the folder of a run, whose latest checkpoint is used.
        model: A model returned by `fx.wrap` that matches the saved one (its plan may differ),
            or several by name. The checkpoint may contain other models as well. A model
            without an optimizer loads only parameters and buffers.
        extra: A tree with the structure of the saved one: tensors, dicts and lists are filled in
            place (each rank reads its part of a sharded tensor), objects with `load_state_dict`
            are loaded, attrs records are created. An empty dict or list takes whatever was saved
            in it. Without it, `restored.extra` contains plain values and new tensors on the CPU.
        random: Whether to restore the random generators.
        settings: Whose options of optimizers and schedulers count, such as learning rates: those
            of the checkpoint, or those of the script. Schedulers of the script then make as many
            steps as the saved ones have made; one that follows a metric keeps its counts, and the
            learning rate is that of the script.

    Effects:
        Changes the models in place. Each rank reads its part of the files. A few small
        collectives. While the context is open, its saves never remove the checkpoint. Rank 0 logs
        one line for a model whose plan trains otherwise than the saved one, such as another seed,
        `accumulate` or precision, and one for options of its optimizers and schedulers in which the
        script differs from the checkpoint.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, cannot be read, was written
            by a newer fxtrain, or belongs to another model, or a scheduler of the script cannot be
            advanced (`settings="script"`); on every rank. Models may then be partially loaded.

    Example:
        >>> import fxtrain as fx, tempfile, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     folder = tempfile.mkdtemp()
        ...     _ = fx.save(folder, ctx, model, extra={"best": 0.5})
        ...     fx.restore(folder, ctx, model).extra
        {'best': 0.5}
    """
    check_connected("restore", ctx)
    if settings not in ("checkpoint", "script"):
        raise CheckpointError(f"restore(settings={settings!r}): choose 'checkpoint' or 'script'.")
    models = by_name(model)
    state = ctx.comm.slot(CheckpointState)
    earlier = state.restored_from
    try:
        with fail_together(ctx, "restore", src=0):
            found = find_checkpoint(path) if ctx.is_main else None
        location, manifest = _from_main(found, ctx)
        storage = open_storage(location)
        with fail_together(ctx, "restore"):
            state.restored_from = storage.key()  # no save removes it meanwhile
            restored = _restore(storage, manifest, ctx, models, extra, random)
            for name, wrapped in models.items():
                _log_changes(ctx, restored, name, wrapped)
                saved = decode(manifest.models[name].get("settings", {}), str)
                _settle_settings(restored.path, name, wrapped, saved, settings)
    except Exception as error:  # any error of the models or of the template
        state.restored_from = earlier
        known = isinstance(error, FxError | OSError) and str(error)
        raise CheckpointError(f"{path} was not restored. {known or repr(error)}") from error
    return restored


def _from_main(found: tuple[Storage, Manifest] | None, ctx: DistContext) -> tuple[str, Manifest]:
    """The checkpoint that rank 0 has found, and its manifest, which only rank 0 has read.

    That of a large run takes seconds to read and to check.
    """
    if ctx.world_size == 1 and found is not None:
        return str(found[0]), found[1]
    sent = EMPTY if found is None else dump((str(found[0]), packed(found[1])), ctx)
    size = ops.broadcast_object(sent.numel(), ctx)
    received = ops.broadcast(sent if ctx.is_main else sent.new_empty(size), ctx)
    ((path, manifest),) = unpickle_all("restore", {0: received}, ctx)
    return path, manifest


def restore_newest(
    path: StrPath,
    ctx: DistContext,
    model: Wrapped,
    *,
    extra: object = None,
    settings: Literal["checkpoint", "script"] = "checkpoint",
) -> Restored | None:
    """Restore the latest checkpoint of a folder that is not damaged; None if the folder has none.

    Effects:
        As `restore`. If it fails, rank 0 verifies every byte of that checkpoint, and logs its
        damage before the one that was committed before it is restored.

    Raises:
        CheckpointError: the latest one is not damaged and cannot be restored, or all of them are
            damaged.
    """
    with fail_together(ctx, src=0) as together:
        together.value = latest(path) if ctx.is_main else None
    while (chosen := together.values[0]) is not None:
        try:
            return restore(chosen, ctx, model, extra=extra, settings=settings)
        except CheckpointError as error:
            with fail_together(ctx, src=0) as together:
                together.value = _before_damaged(path, chosen, error) if ctx.is_main else None
    return None


def _before_damaged(folder: StrPath, path: str, error: CheckpointError) -> str:
    """The checkpoint before one that could not be restored; the error, if that is not damaged."""
    try:
        verify(path)
    except CheckpointError as problem:
        earlier = None
        if problem.code == "FX602":
            earlier = committed_before(folder, os.path.basename(path))
        if earlier is not None:
            _LOG.warning("%s is restored, since %s", earlier, problem)
            return earlier
    raise error


def _log_changes(ctx: DistContext, restored: Restored, name: str, model: Wrapped) -> None:
    """Log on rank 0 what its plan changes for the training of a model."""
    now, saved = unstructure(model.plan), restored._plans[name]
    if not model.optimizers or saved == now:
        return
    saved = {**saved, **{field: now[field] for field in _PLACING}}
    changes = [
        f"{change.path} {shown(change.left)} → {shown(change.right)}"
        for change in diff(structure(saved, Plan), model.plan)
    ]
    if changes:
        ops.log(ctx).info(
            "restore: the plan of %r differs from that of %s: %s.",
            name,
            restored.path,
            "; ".join(changes),
        )


def _settle_settings(
    path: str, name: str, model: Wrapped, saved: Mapping[str, object], whose: str
) -> None:
    """Let options of the script count, if asked, and log on rank 0 which differ.

    Args:
        saved: Those of the checkpoint by name; empty if it names none.
    """
    status = model.status
    script = plain_settings(status.script_settings)
    changes = [
        f"{key} {shown(saved[key])} → {shown(value)}"
        for key, value in script.items()
        if saved.get(key, value) != value and not _follows(key, script)
    ]
    if whose == "script":
        use_script_settings(model)
    status.settings = dict(saved) if saved and whose == "checkpoint" else script
    if changes:
        ops.log(model.ctx).info(
            "restore: options of optimizers and schedulers of %r in %s differ from the script's "
            "(%s), and those of the %s are used.%s",
            name,
            path,
            "; ".join(changes),
            whose,
            ""
            if whose == "script"
            else ' fx.restore(..., settings="script") and fx.fit(..., restore_settings="script") '
            "use the script's.",
        )


def _follows(key: str, settings: Mapping[str, object]) -> bool:
    """Whether a setting follows from others: of a scheduler, or of its learning rate at present."""
    where, _, option = key.rpartition(": ")
    scheduled = option == "lr" and f"{where}: initial_lr" in settings
    return scheduled or option == "base_lrs" or option.startswith("_")


def _restore(
    storage: Storage,
    manifest: Manifest,
    ctx: DistContext,
    models: Mapping[str, Wrapped],
    extra: Any,
    random: bool,  # noqa: FBT001
) -> Restored:
    missing = [name for name in models if name not in manifest.models]
    if missing:
        raise CheckpointError(
            f"No model {', '.join(missing)} in this checkpoint; it contains "
            f"{', '.join(manifest.models)}.",
            code="FX603",
        )
    with open_reader(storage, manifest) as reader:
        for name, model in models.items():
            model.status.before_window = model.status.before_call = None
            model.strategy.load_state(model, _state_reader(reader, name, ctx))
        user = _load_into(extra, manifest.extra, reader)
        if random:
            seed = next(iter(models.values())).plan.seed + manifest.position.updates
            set_random_state(ctx, _own_tensors(reader, ""), len(manifest.own), seed)
    return Restored(
        path=str(storage),
        position=manifest.position,
        extra=user,
        world_size=len(manifest.own),
        plans={name: saved["plan"] for name, saved in manifest.models.items()},
    )


def _state_reader(reader: Reader, name: str, ctx: DistContext) -> StateReader:
    """A reader of one model's state in a checkpoint."""
    manifest = reader.manifest
    kinds, paths = kinds_of(manifest.tensors), manifest.keys_of(name)
    described = {key: kinds[manifest.aliases.get(path, path)] for key, path in paths.items()}
    return StateReader(
        shapes={key: (shape, DTYPES[dtype]) for key, (dtype, shape) in described.items()},
        fill=lambda key, tensor: reader.fill(paths[key], tensor),
        values=values_by_name(decode(manifest.models[name]["values"], reader.once)),
        own=_own_tensors(reader, name),
        ranks=len(manifest.own),
        rank=ctx.rank,
        loading_ranks=ctx.world_size,
        updates=manifest.position.updates,
    )


def _own_tensors(reader: Reader, model: str) -> Any:
    def read(key: Key, rank: int) -> Tensor | None:
        path = encode_key(model, key)
        entry = reader.manifest.own[rank].get(path)
        return None if entry is None else reader.new(path, entry)

    return read


def _load_into(template: Any, data: Any, reader: Reader, path: str = EXTRA) -> Any:
    """Convert a saved tree to the types of a template, filling tensors and objects in place.

    Args:
        template: The tree; None, an empty dict or an empty list takes whatever was saved.
        data: The saved tree, as `encode` wrote it.

    Raises:
        CheckpointError: their structures differ; the message names the path.
    """
    if isinstance(template, Tensor):
        return _fill(template, data, reader, path)
    inner, fields = _inner(data, reader), None
    if isinstance(template, Mapping) and template:
        fields = template
    elif isinstance(template, list | tuple) and template:
        fields = dict(enumerate(template))
    if fields is None:
        return _replaced(template, decode(data, reader.once))
    if fields.keys() != inner.keys():
        raise CheckpointError(
            f"{path} has the keys {sorted(map(str, fields))} in the template, but was saved with "
            f"{sorted(map(str, inner))}. Pass a template with the structure that was saved.",
            code="FX603",
        )
    read = {
        key: _load_into(value, inner[key], reader, f"{path}.{key}") for key, value in fields.items()
    }
    return _replaced(template, read if isinstance(template, Mapping) else list(read.values()))


def _replaced(template: Any, value: Any) -> Any:
    """A value as the template has it: in place, since the script may have a name for it."""
    if attrs.has(type(template)):
        return structure(value, type(template))
    if callable(getattr(template, "load_state_dict", None)):
        template.load_state_dict(value)
        return template
    if isinstance(template, MutableMapping):
        template.update(value)
        return template
    if isinstance(template, list):
        template[:] = value
        return template
    return tuple(value) if isinstance(template, tuple) else value


def _inner(data: Any, reader: Reader) -> dict[Any, Any]:
    """The entries of a saved dict, list or tuple, as `encode` wrote them."""
    match data:
        case {"$": "dict", "items": items}:
            return {decode(key, reader.once): value for key, value in items}
        case list(items) | {"$": "tuple", "items": items}:
            return dict(enumerate(items))
        case dict() if "$" not in data:
            return data
        case _:
            return {}


@torch.no_grad()
def _fill(template: Tensor, data: Any, reader: Reader, path: str) -> Tensor:
    """Fill a tensor, plain or sharded, of which this rank reads its part; return it detached."""
    if not isinstance(data, dict) or data.get("$") != "tensor":
        raise CheckpointError(
            f"{path} is a tensor in the template, but was saved as {str(data)[:80]}. Pass a "
            f"template with the structure that was saved.",
            code="FX603",
        )
    name, target = data["name"], template.detach()
    dtype = DTYPES[reader.dtype(name)]
    saved = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
    reader.fill(name, saved)
    return target if saved is target else target.copy_(saved)
