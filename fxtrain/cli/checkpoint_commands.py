"""`fxtrain verify`, `merge-weights` and `import`: checkpoints looked at, and made from others."""

import importlib
import os
import sys
from typing import Any

import click

from fxtrain._errors import LaunchError
from fxtrain.cli.exit_codes import Exit
from fxtrain.cli.output import as_json, print_json, say, warn

__all__ = ["IMPORT", "MERGE", "VERIFY"]


@click.command("verify")
@as_json
@click.argument("path")
def VERIFY(path: str, json_: bool) -> int:  # noqa: FBT001
    """Compare every byte of a checkpoint, or of the latest in a folder, with its digest."""
    from fxtrain._errors import CheckpointError
    from fxtrain.checkpoint import verify
    from fxtrain.checkpoint.manifest import NewerFormatError
    from fxtrain.checkpoint.storage import UnreadableError

    try:
        found = verify(path)
    except (UnreadableError, NewerFormatError):
        raise  # nothing is known of its bytes
    except CheckpointError as error:
        if json_:
            print_json({"path": path, "whole": False, "problem": str(error)})
        else:
            warn(str(error))
        return Exit.FOUND
    if json_:
        print_json(
            {
                "path": found.path,
                "whole": True,
                "updates": found.position.updates,
                "tensors": found.tensors,
                "bytes": found.size,
                "ranks": found.world_size,
            }
        )
    else:
        say(
            f"{found.path} is whole: update {found.position.updates}, {found.tensors} tensors, "
            f"{found.size / 1e6:.1f} MB, saved by {found.world_size} ranks."
        )
    return Exit.WELL


@click.command("merge-weights")
@click.option("--model", help="name of the model, where the checkpoint holds several")
@click.option("--max-shard", default="5GB", show_default=True, help="largest file")
@as_json
@click.argument("checkpoint")
@click.argument("folder")
def MERGE(checkpoint: str, folder: str, model: str | None, max_shard: str, json_: bool) -> int:  # noqa: FBT001
    """Write the weights of CHECKPOINT, or of the latest in a folder, as model files in FOLDER."""
    from fxtrain.checkpoint import merge

    files = merge(checkpoint, folder, model=model, max_shard=max_shard)
    if json_:
        print_json({"files": [str(file) for file in files]})
    else:
        for file in files:
            say(str(file))
    return Exit.WELL


@click.command("import")
@click.option("--model", "factory", help="MODULE:FUNCTION that makes the model, for its names")
@click.option("--epoch", default=0, show_default=True, help="where the run stood: its epoch")
@click.option("--index", default=0, show_default=True, help="rows of that epoch already seen")
@click.option("--updates", default=0, show_default=True, help="optimizer updates so far")
@click.option("--no-optimizer", is_flag=True, help="weights only")
@as_json
@click.argument("source")
@click.argument("folder")
def IMPORT(
    source: str,
    folder: str,
    factory: str | None,
    epoch: int,
    index: int,
    updates: int,
    no_optimizer: bool,  # noqa: FBT001
    json_: bool,  # noqa: FBT001
) -> int:
    """Write what Accelerate, DeepSpeed or torch's DCP saved in SOURCE as a checkpoint."""
    from fxtrain.interop import import_checkpoint
    from fxtrain.state import Position

    path = import_checkpoint(
        source,
        folder,
        module=None if factory is None else _made(factory),
        position=Position(epoch=epoch, index=index, updates=updates),
        optimizer=not no_optimizer,
    )
    if json_:
        print_json({"path": path})
    else:
        say(path)
    return Exit.WELL


def _made(factory: str) -> Any:
    """Call the factory, on the meta device: only the names of the model are wanted."""
    import torch

    module, _, name = factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
        with torch.device("meta"):
            made = make()
    except Exception as error:  # whatever the user's code raises
        raise LaunchError(
            f"import --model {factory}: {type(error).__name__}: {error}. Name a function that "
            f"makes the model without arguments, as MODULE:FUNCTION."
        ) from error
    if not isinstance(made, torch.nn.Module):
        raise LaunchError(
            f"import --model {factory}: it made a {type(made).__name__}, and a torch.nn.Module "
            f"was expected. Name a function that makes the model, as MODULE:FUNCTION."
        )
    return made
