"""What a checkpoint of a streamed model holds: what is trained, and which files have the rest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.offload.offload_folder import digest_of
from fxtrain.backends.offload.streaming import Streaming
from fxtrain.state import ModelState, StateReader, Wrapped

__all__ = ["load_trained", "trained_state"]

_FILES = "frozen_files"


def trained_state(model: Wrapped) -> ModelState:
    """The state without frozen parameters that are in model files, whose digests it has instead.

    Effects:
        Reads those files once, the first time.
    """
    state = state_of(model, omit=_frozen(model.strategy_state))
    return attrs.evolve(state, values={**state.values, _FILES: _digests(model.strategy_state)})


def load_trained(model: Wrapped, saved: StateReader) -> None:
    """Put a saved state into a model whose frozen parameters come from the same files.

    Raises:
        CheckpointError: the files are others, or it is the state of another model.
    """
    wanted: Mapping[str, Any] = saved.values.get(_FILES, {})
    found = _digests(model.strategy_state)
    if sorted(wanted.values()) != sorted(found.values()):
        others = [name for name, digest in wanted.items() if digest not in found.values()]
        raise CheckpointError(
            f"The checkpoint belongs to frozen parameters in {', '.join(wanted) or 'no file'}, "
            f"and this model has them from {', '.join(found) or 'no file'}"
            f"{f': {others[0]} has another digest' if others else ''}. Load the files with which "
            f"the checkpoint was saved.",
            code="FX603",
        )
    load_state(model, saved, omit=_frozen(model.strategy_state))


def _frozen(streaming: Streaming) -> frozenset[str]:
    return frozenset(
        name for one in _from_files(streaming) for name in streaming.tensors[one].names
    )


def _from_files(streaming: Streaming) -> list[str]:
    """Parameters that stay as the files have them; a forward may change any buffer."""
    return [
        name
        for name in streaming.sources
        if not (one := streaming.tensors[name]).is_buffer and (one.streamed or not one.trained)
    ]


def _digests(streaming: Streaming) -> dict[str, str]:
    """The digests of the files with frozen parameters, by the names of the files."""
    paths = sorted({streaming.sources[name] for name in _from_files(streaming)})
    for path in paths:
        if path not in streaming.digests:
            streaming.digests[path] = _digest(path)
    return {path.name: streaming.digests[path] for path in paths}


def _digest(path: Path) -> str:
    try:
        return digest_of(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}, which has frozen parameters, cannot be read: {error.strerror or error}. A "
            f"checkpoint names such files with their digests."
        ) from error
