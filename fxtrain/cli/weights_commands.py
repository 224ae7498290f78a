"""`fxtrain merge-weights` and `fxtrain import`: checkpoints as model files, and the reverse."""

import click

from fxtrain.cli.output import as_json, report


@click.command("merge-weights")
@click.option("--model", help="name of the model, if the checkpoint has several")
@click.option("--max-shard", default="5GB", show_default=True, help="maximum size of a file")
@as_json
@click.argument("checkpoint")
@click.argument("folder")
def MERGE(checkpoint: str, folder: str, model: str | None, max_shard: str) -> None:
    """Write the weights of CHECKPOINT, or of the latest in a folder, as model files in FOLDER."""
    from fxtrain.checkpoint import merge

    files = [*map(str, merge(checkpoint, folder, model=model, max_shard=max_shard))]
    report({"files": files}, "\n".join(files))


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
) -> None:
    """Convert a checkpoint of Accelerate, DeepSpeed, Megatron or torch's DCP in SOURCE."""
    from fxtrain.interop import import_checkpoint
    from fxtrain.models.code_models import build_on_meta
    from fxtrain.state import Position

    path = import_checkpoint(
        source,
        folder,
        # Only the model's names are needed.
        module=None if factory is None else build_on_meta(factory),
        position=Position(epoch=epoch, index=index, updates=updates),
        optimizer=not no_optimizer,
    )
    report({"path": path}, path)
