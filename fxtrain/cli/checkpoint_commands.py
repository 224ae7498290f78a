"""`fxtrain verify`, `merge-weights` and `import`: check, export and convert checkpoints."""

from typing import Any

import click

from fxtrain._display import counted
from fxtrain.cli.output import Exit, as_json, print_json, say, warn
from fxtrain.errors import LaunchError


@click.command("verify")
@as_json
@click.argument("path")
def VERIFY(path: str, json_: bool) -> int:  # noqa: FBT001
    """Compare every byte of a checkpoint, or of the latest in a folder, with its digests."""
    from fxtrain.checkpoint import verify
    from fxtrain.checkpoint.manifest import NewerFormatError
    from fxtrain.checkpoint.storage import UnreadableError
    from fxtrain.errors import CheckpointError

    try:
        checkpoint = verify(path)
    except (UnreadableError, NewerFormatError):
        raise  # its bytes could not be checked
    except CheckpointError as error:
        if error.code == "FX601":  # there is no checkpoint to check
            raise
        if json_:
            print_json({"path": path, "whole": False, "problem": str(error)})
        else:
            warn(str(error))
        return Exit.FOUND
    if json_:
        print_json(
            {
                "path": checkpoint.path,
                "whole": True,
                "updates": checkpoint.position.updates,
                "tensors": checkpoint.tensors,
                "bytes": checkpoint.size,
                "ranks": checkpoint.world_size,
            }
        )
    else:
        say(
            f"{checkpoint.path} is intact: update {checkpoint.position.updates}, "
            f"{counted(checkpoint.tensors, 'tensor')}, {checkpoint.size / 1e6:.1f} MB, saved by "
            f"{counted(checkpoint.world_size, 'rank')}."
        )
    return Exit.WELL


@click.command("merge-weights")
@click.option("--model", help="name of the model, if the checkpoint has several")
@click.option("--max-shard", default="5GB", show_default=True, help="maximum size of a file")
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
@click.option("--model", "factory", help="MODULE:FUNCTION that builds the model, for its names")
@click.option("--epoch", default=0, show_default=True, help="epoch in which the run stopped")
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
    """Convert a checkpoint of Accelerate, DeepSpeed, Megatron or torch's DCP in SOURCE."""
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
    """Call the factory on the meta device: only the model's names are needed."""
    import torch

    from fxtrain.models.weight_list import import_function

    try:
        with torch.device("meta"):
            model = import_function(factory)()
    except Exception as error:  # any error of the user's code
        raise LaunchError(
            f"import --model {factory}: {type(error).__name__}: {error}. Name a function that "
            f"builds the model without arguments, as MODULE:FUNCTION."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise LaunchError(
            f"import --model {factory}: it returned a {type(model).__name__}, not a "
            f"torch.nn.Module. Name a function that builds the model, as MODULE:FUNCTION."
        )
    return model
