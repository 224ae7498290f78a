"""`fxtrain verify` and `fxtrain merge-weights`: checkpoints looked at, and made into models."""

import click

from fxtrain.cli._exit import Exit
from fxtrain.cli._report import as_json, print_json

__all__ = ["MERGE", "VERIFY"]


@click.command("verify")
@as_json
@click.argument("path")
def VERIFY(path: str, json_: bool) -> int:  # noqa: FBT001
    """Compare every byte of a checkpoint, or of the latest in a folder, with its digest."""
    from fxtrain._errors import CheckpointError
    from fxtrain.checkpoint import verify

    try:
        found = verify(path)
    except CheckpointError as error:
        if json_:
            print_json({"path": path, "whole": False, "problem": str(error)})
        else:
            click.echo(str(error), err=True)
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
        click.echo(
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
            click.echo(str(file))
    return Exit.WELL
