"""`fxtrain verify`: whether a checkpoint is intact."""

import click

from fxtrain._display import counted
from fxtrain.cli.output import Exit, as_json, report, warn
from fxtrain.errors import CheckpointError


@click.command("verify")
@as_json
@click.argument("path")
def VERIFY(path: str) -> int:
    """Compare every byte of a checkpoint, or of the latest in a folder, with its digests."""
    from fxtrain.checkpoint import verify
    from fxtrain.checkpoint.manifest import NewerFormatError
    from fxtrain.checkpoint.storage import UnreadableError

    try:
        checkpoint = verify(path)
    except (UnreadableError, NewerFormatError):
        raise  # its bytes could not be checked
    except CheckpointError as error:
        if error.code == "FX601":  # there is no checkpoint to check
            raise
        problem = str(error)
        report({"path": path, "whole": False, "problem": problem}, lambda: warn(problem))
        return Exit.FOUND
    data = {
        "path": checkpoint.path,
        "whole": True,
        "updates": checkpoint.position.updates,
        "tensors": checkpoint.tensors,
        "bytes": checkpoint.size,
        "ranks": checkpoint.world_size,
    }
    report(
        data,
        f"{checkpoint.path} is intact: update {checkpoint.position.updates}, "
        f"{counted(checkpoint.tensors, 'tensor')}, {checkpoint.size / 1e6:.1f} MB, saved by "
        f"{counted(checkpoint.world_size, 'rank')}.",
    )
    return Exit.WELL
