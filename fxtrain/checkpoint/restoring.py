"""Restoring: at any number of ranks, reading only what a rank needs."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from fxtrain import ops
from fxtrain._errors import CheckpointError, CollectiveError, FxError
from fxtrain.checkpoint.folders import checkpoint_at, read_manifest
from fxtrain.checkpoint.json_values import decode
from fxtrain.checkpoint.local_storage import open_storage
from fxtrain.checkpoint.manifest import Manifest
from fxtrain.checkpoint.reading import Reader, open_reader
from fxtrain.checkpoint.rng_state import set_random_state
from fxtrain.checkpoint.snapshot import by_name
from fxtrain.checkpoint.templates import load_into
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.ops.same_errors import problem_of_ranks
from fxtrain.state import (
    DistContext,
    Plan,
    Position,
    StateReader,
    Wrapped,
    check_connected,
    structure,
)

__all__ = ["Restored", "restore"]


@attrs.frozen(kw_only=True, eq=False)
class Restored:
    """What a checkpoint gave beside the models.

    Attributes:
        path: The checkpoint.
        position: Where the run stood: go on with `loader.at(position)`.
        extra: The user's state.
        world_size: Ranks that saved.
        fingerprints: Of the plans that the models were saved under, by model.
    """

    path: str
    position: Position
    extra: Any
    world_size: int
    fingerprints: Mapping[str, str]
    _plans: Mapping[str, Any] = attrs.field(alias="plans", repr=False)

    def plan(self, name: str = "model") -> Plan:
        """The plan that a model was saved under.

        Raises:
            CheckpointError: there is no model of that name.
            PlanError: the plan names a strategy that is not installed.
        """
        if name not in self._plans:
            raise CheckpointError(
                f"{self.path} holds no model {name!r}; it has {', '.join(self._plans)}."
            )
        return structure(self._plans[name], Plan)


def restore(
    path: Any,
    ctx: DistContext,
    model: Wrapped | Mapping[str, Wrapped],
    *,
    extra: Any = None,
    random: bool = True,
) -> Restored:
    """Fill models with what `save` wrote, and put the random generators back.

    The number of ranks, the mesh and the strategy may be others than those that saved. At the
    same number of ranks a run goes on bit for bit; at another, with exactly the rows not yet
    seen, and a rank beyond those that saved gets generators of its own.

    Args:
        path: A checkpoint, or the folder of a run, of which the latest is taken.
        model: What `fx.wrap` returned, wrapped like the model that was saved (under another
            plan if you like), or several by name. A checkpoint may hold more of them. A model
            without an optimizer takes parameters and buffers only.
        extra: A tree like the one that was saved: its tensors are filled in place, its
            objects with `load_state_dict` loaded, its attrs records made anew. Without it,
            `restored.extra` holds plain values and new tensors on the CPU.
        random: Put the random generators back too.

    Effects:
        Changes the models in place. Each rank reads its part of the files. A few small
        collectives. As long as the context is open, its saves never remove the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it cannot be read, a newer
            fxtrain wrote it, or it is of another model; on every rank. A model may then hold
            a part of it.

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
    models = by_name(model)
    problem: BaseException | None = None
    restored = None
    state = ctx.comm.state
    earlier = state.restored_from
    _finish_background_copies(ctx, models)
    try:
        chosen = ops.broadcast_object(_choose_checkpoint(path) if ctx.is_main else None, ctx)
        if isinstance(chosen, BaseException):
            raise chosen
        state.restored_from = open_storage(chosen).key()  # before it is read: no save removes it
        restored = _restore(chosen, ctx, models, extra, random)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    try:
        _agree(ctx, problem, path)
    except CollectiveError as error:
        state.restored_from = earlier
        raise CheckpointError(f"{path} was not restored. {problem or error}") from error
    except CheckpointError:
        state.restored_from = earlier
        raise
    assert restored is not None
    return restored


def _finish_background_copies(ctx: DistContext, models: Mapping[str, Wrapped]) -> None:
    """Let saves in the background copy what is about to change."""
    for comm in {ctx.comm, *(model.ctx.comm for model in models.values())}:
        for saving in comm.state.background_tasks:
            saving.copied()


def _agree(ctx: DistContext, problem: BaseException | None, path: Any) -> None:
    """Raise on every rank if one could not restore."""
    known = isinstance(problem, FxError | OSError)
    words = "" if problem is None else (known and str(problem)) or repr(problem)
    if found := problem_of_ranks("restore", words, ctx):
        raise CheckpointError(f"{path} was not restored. {found}") from problem


def _choose_checkpoint(path: Any) -> str | CheckpointError:
    """Which checkpoint it is; an error is a value, to be sent."""
    try:
        return str(checkpoint_at(path))
    except FxError as error:
        return CheckpointError(str(error))
    except Exception as error:  # whatever it is, the other ranks wait for a word
        return CheckpointError(f"{type(error).__name__}: {error}")


def _restore(
    path: str,
    ctx: DistContext,
    models: Mapping[str, Wrapped],
    extra: Any,
    random: bool,  # noqa: FBT001
) -> Restored:
    place = open_storage(path)
    manifest = read_manifest(place)
    missing = [name for name in models if name not in manifest.models]
    if missing:
        raise CheckpointError(
            f"It holds no model {', '.join(missing)}, but {', '.join(manifest.models)}."
        )
    with open_reader(place, manifest) as reader:
        for name, model in models.items():
            model.strategy.load_state(model, _saved(reader, name, ctx))
        user = decode(manifest.extra, reader.once)
        if extra is not None:
            user = load_into(extra, user)
        if random:
            seed = next(iter(models.values())).plan.seed + manifest.position.updates
            own = _own(reader, "")
            set_random_state(ctx, own, len(manifest.own), seed)
    return Restored(
        path=path,
        position=manifest.position,
        extra=user,
        world_size=len(manifest.own),
        fingerprints={name: one["fingerprint"] for name, one in manifest.models.items()},
        plans={name: one["plan"] for name, one in manifest.models.items()},
    )


def _saved(reader: Reader, name: str, ctx: DistContext) -> StateReader:
    """One model's part of a checkpoint."""
    manifest: Manifest = reader.manifest
    prefix = f"{name}/"
    entries = {
        full.removeprefix(prefix): reader.entry(full)
        for full in (*manifest.tensors, *manifest.aliases)
        if full.startswith(prefix)
    }
    return StateReader(
        shapes={short: (one.shape, DTYPES[one.dtype]) for short, one in entries.items()},
        fill=lambda short, tensor: reader.fill(prefix + short, tensor),
        values=decode(manifest.models[name]["values"], reader.once),
        own=_own(reader, prefix),
        ranks=len(manifest.own),
        rank=ctx.rank,
        loading_ranks=ctx.world_size,
    )


def _own(reader: Reader, prefix: str) -> Any:
    def read(name: str, rank: int) -> Tensor | None:
        entry = reader.manifest.own[rank].get(prefix + name)
        return None if entry is None else reader.new_entry(entry, prefix + name)

    return read
