"""What the codes mean with which errors end: cause and cure.

The page of errors and `fxtrain explain` are both made of this table.
"""

from typing import NamedTuple

__all__ = ["ERROR_CODES", "ErrorCode"]


class ErrorCode(NamedTuple):
    """A code of errors.

    Attributes:
        code: FX and three digits. The first digit is that of the class. A code is never reused.
        error: Class of the errors.
        title: What happened, in a few words; empty for the code of a class, which its errors have
            where no other code fits.
        see: Page of the documentation, with an anchor where only a section is about it; or empty.
        cause: Why such an error is raised.
        cure: What to do.
    """

    code: str
    error: str
    title: str
    see: str
    cause: str
    cure: str


ERROR_CODES = (
    ErrorCode(
        "FX001", "FxError", "", "concepts/errors",
        "This is the base class of all errors of fxtrain.",
        "Catch it to handle every error that fxtrain raises on purpose: `except fx.FxError`.",
    ),
    ErrorCode(
        "FX003", "FxError", "A wrapped model cannot be copied or pickled",
        "names#the-names-of-a-module-on-a-wrapped-model",
        "`copy.deepcopy`, `pickle` or `torch.save` received the result of `fx.wrap`, which "
        "holds process groups and hooks, and under some strategies only a shard of each "
        "parameter.",
        "Use `dict(fx.weights(model))` for full tensors, `fx.save` for a checkpoint, or "
        "`fx.export` for model files.",
    ),
    ErrorCode(
        "FX100", "ContextError", "", "concepts/mesh",
        "`fx.detect` received an invalid argument, or a function received something else than a "
        "context.",
        "Create the context once, with `ctx = fx.detect()`, and pass it where the message says.",
    ),
    ErrorCode(
        "FX101", "ContextError", "The variables of the launcher are incomplete", "environment",
        "`RANK`, `WORLD_SIZE` and similar variables are set for some values only, contradict "
        "each other or are not numbers: for example `RANK` is left over from another shell, or "
        "a script runs inside a SLURM job without `srun`.",
        "Start the script with `fxtrain launch`, torchrun or srun, which set all of them; or "
        "unset them to run on one rank. `fxtrain env` shows what is set.",
    ),
    ErrorCode(
        "FX102", "ContextError", "The ranks could not connect", "launching#several-nodes",
        "A rank could not reach rank 0 at its address and port, or some ranks never joined: "
        "they failed before `fx.detect`, were not started, or a firewall is between them.",
        "Read the output of the ranks in the message first. Then check that every rank has the "
        "same `MASTER_ADDR` and `MASTER_PORT`, that rank 0 runs there, and that its port is "
        "open. On a machine with several networks, set `GLOO_SOCKET_IFNAME` and "
        "`NCCL_SOCKET_IFNAME`.",
    ),
    ErrorCode(
        "FX103", "ContextError", "The secret of the run differs", "launching#network-security",
        "Ranks sign the objects that they exchange with `FXTRAIN_RUN_SECRET`. On some rank the "
        "variable is missing, too short or different, or another program sent the data.",
        "Set the variable to the same 16 or more characters on every rank, or on none. If it is "
        "the same everywhere, check who can reach the ports of the ranks.",
    ),
    ErrorCode(
        "FX104", "ContextError", "The device does not exist or is shared", "how_to/devices",
        "torch does not find the requested device, the node has fewer devices than ranks, or "
        "two ranks have the same device.",
        "Launch at most one rank per device, or omit `device`. If torch should find more "
        "devices, compare `fxtrain env` with the driver and `CUDA_VISIBLE_DEVICES`.",
    ),
    ErrorCode(
        "FX105", "ContextError", "The context is closed", "concepts/overview#the-context",
        "`fx.close(ctx)` was called, or the `with fx.detect() as ctx:` block ended, before this "
        "call. A function that ran later, such as one registered with `atexit`, uses the "
        "context.",
        "Move the call into the block, or open another context with `fx.detect()`.",
    ),
    ErrorCode(
        "FX110", "MeshError", "", "concepts/mesh",
        "The product of the axes of a mesh is not the number of ranks, or a strategy needs an "
        "axis that the mesh does not have.",
        "Change the mesh or the number of ranks. One axis may be -1, for all remaining ranks: "
        "`fx.Mesh(replicate=-1, tensor=2)`.",
    ),
    ErrorCode(
        "FX200", "PlanError", "", "plan",
        "An argument has a value that is invalid, or that contradicts another one. Plans and "
        "configs are checked when they are created, and again by `fx.wrap` against the model.",
        "Change the value as the message says. It names the argument as it was written, what "
        "was found and what is allowed.",
    ),
    ErrorCode(
        "FX201", "PlanError", "A file of settings cannot be read", "plan",
        "A plan file or launch file does not exist, has an unknown suffix or is not valid TOML, "
        "YAML or JSON.",
        "Fix the line in the message. `fxtrain config` writes a launch file, `fx.write_plan` a "
        "plan file, and `fxtrain config check` lists all problems of a launch file.",
    ),
    ErrorCode(
        "FX202", "PlanError", "The strategy does not support this plan or model",
        "strategies#which-strategy-takes-which-field",
        "`fx.wrap` checks the plan, the mesh and the model against the strategy, and found "
        "problems: for example a field that DeepSpeed implements differently, or a pipeline "
        "without an axis for its stages. The message lists all of them.",
        "Change each field in the list, or choose another strategy. A table shows which "
        "strategy supports which field.",
    ),
    ErrorCode(
        "FX300", "CollectiveError", "", "collectives",
        "A collective received arguments that it cannot exchange: a rank that does not exist, "
        "an operation that the dtype does not have, or a context of another thread.",
        "Change the argument as the message says. It is the same on every rank.",
    ),
    ErrorCode(
        "FX301", "CollectiveError", "The ranks made different calls",
        "how_to/debug_hang#ranks-call-different-collectives",
        "Ranks called different collectives, or the same one with different shapes, dtypes or "
        "settings. The message shows the call of each rank with its file and line. Usual "
        "causes: a call under `if ctx.rank == 0`, loops of different lengths, a plan that "
        "depends on the rank.",
        "Make the same calls in the same order on every rank. Use `fx.ops.on_main` for the work "
        "of one rank, and `fx.ops.pad` for ragged tensors.",
    ),
    ErrorCode(
        "FX302", "CollectiveError", "A rank never joined", "how_to/debug_hang#a-rank-never-joins",
        "A rank failed, is still busy or skipped the call, and the others waited until the "
        "timeout. The message names the missing ranks and where the others waited.",
        "Read the output of the missing ranks. If one was only slow, such as while it "
        "downloaded data, use `fx.ops.main_first` or a longer `fx.detect(timeout_s=...)`. The "
        "communicator is unusable afterwards: close the context, or end the process.",
    ),
    ErrorCode(
        "FX303", "CollectiveError", "Another rank failed", "concepts/errors",
        "This rank did not fail itself. The message has the error of each rank that did. "
        "If that is an error of fxtrain, the message ends with its code and not with this one.",
        "Fix the error in the message; the output of its rank has the traceback.",
    ),
    ErrorCode(
        "FX304", "CollectiveError", "An object cannot be sent", "collectives#objects",
        "A value other than tensors and plain values does not pickle on its rank, or its class "
        "cannot be imported on another one.",
        "Send tensors or plain values, or define the class at the top level of a module that "
        "every rank can import in the same version.",
    ),
    ErrorCode(
        "FX400", "DataError", "", "data",
        "A loader or a batch cannot be split over ranks as requested, or a function of data "
        "received an invalid value.",
        "Pass a plain `DataLoader` to `fx.shard`, without a `DistributedSampler`, and change "
        "the setting that the message names.",
    ),
    ErrorCode(
        "FX401", "DataError", "A position belongs to other data", "data#cursor",
        "A run continues from a position that the loader does not have: the dataset is shorter, "
        "or the batch size differs from that at the time of the checkpoint.",
        "Resume with the data and batch size of the checkpoint, or start a new epoch with "
        "`loader.at(fx.Position())`.",
    ),
    ErrorCode(
        "FX402", "DataError", "Reading the data failed", "data#workers",
        "A worker process of the `DataLoader` ended, or rank 0 failed while it read for all "
        "ranks.",
        "Set `num_workers=0` to see the error in the process itself. A worker that was killed "
        "often ran out of memory: use fewer workers or smaller batches.",
    ),
    ErrorCode(
        "FX500", "StepError", "", "steps",
        "A step received something else than a context, a batch of a sharded loader and a "
        "wrapped model with its loss, or the model computes something that its strategy cannot "
        "train.",
        "Pass what the message says: `fx.step(ctx, batch, fx.StepFns(model=model, loss=loss))`, "
        "with `model = fx.wrap(...)` and a `batch` of `fx.shard(...)`.",
    ),
    ErrorCode(
        "FX501", "StepError", "The loss or the gradients are not finite", "how_to/nan_gradients",
        "A loss or a gradient is NaN or infinite on the ranks in the message. The update was "
        "skipped, so the parameters are those from before. Usual causes: a learning rate that "
        "is too high, a division by zero, a logarithm of zero, a damaged row, float16 without "
        "loss scaling.",
        "Find the operation with `torch.autograd.set_detect_anomaly(True)`, and the row by the "
        'position in the message. `fx.Plan(nonfinite="skip")` skips such updates and continues.',
    ),
    ErrorCode(
        "FX502", "StepError", "The loss cannot be used", "how_to/shape_mismatch",
        "The loss is not a scalar tensor that requires grad: it has one value per row, was "
        "detached, was computed under `torch.no_grad` or outside of autocast, or backward "
        "already ran on it.",
        "Return `loss.mean()` or `fx.Weighted(losses.sum(), losses.numel())`, and leave "
        "backward to `fx.step` or `fx.update`.",
    ),
    ErrorCode(
        "FX503", "StepError", "The loss does not depend on every parameter",
        "strategies#single-and-ddp",
        "DDP averages the gradients of all parameters, and waits for each of them. In this step "
        "some parameters had no gradient on some rank: a branch or an expert that the batch did "
        "not use.",
        "Use `fx.DDP(unused_parameters=True)`, freeze the parameters that are never used, or "
        "let the loss depend on all of them.",
    ),
    ErrorCode(
        "FX504", "StepError", "The model has no optimizer",
        "steps#ready-made-optimizers-and-schedulers",
        "`fx.wrap` was called without `optimizer=`, so the model evaluates and does not train.",
        "Pass one: `fx.wrap(net, ctx, plan, optimizer=lambda params: "
        "torch.optim.AdamW(params))`.",
    ),
    ErrorCode(
        "FX505", "StepError", "The trained parameters changed where they may not",
        "steps#freezing-and-unfreezing",
        "After `fx.wrap`, `requires_grad_` or `optimizer.add_param_group` changed which parameters "
        "are trained, in a way that the strategy cannot follow: gradients of some parameters would "
        "not be reduced, and the ranks would train different models.",
        "Build the whole model before `fx.wrap`, change `requires_grad` after an update, and wrap "
        "the model again where the message says so: `fx.wrap(fx.unwrap(model), ctx, plan, ...)`.",
    ),
    ErrorCode(
        "FX600", "CheckpointError", "", "checkpoints",
        "A value cannot be saved without pickle, an argument of a function of checkpoints or "
        "model files is invalid, or a folder cannot be written.",
        "Change what the message names. Values that may be saved are tensors, numbers, text, "
        "and lists and dicts of them.",
    ),
    ErrorCode(
        "FX601", "CheckpointError", "There is nothing to load at this path", "checkpoints#resuming",
        "The path does not exist, is empty, or contains something of another kind: model files "
        "where a checkpoint is expected, or a checkpoint where model files are.",
        "Pass the folder of the run, or one of its `update-…` folders, to `fx.restore`; model "
        "files to `fx.load_model`. `fx.latest(folder)` returns None where a run has not saved "
        "yet.",
    ),
    ErrorCode(
        "FX602", "CheckpointError", "The files are damaged", "checkpoints",
        "A file is truncated or its bytes differ from the digests that were saved with it: the "
        "disk was full, a copy was interrupted, or the file was edited.",
        "`fxtrain verify PATH` lists every damaged part. Copy the checkpoint again, or restore "
        "an earlier one of the run: `fx.latest` skips incomplete ones.",
    ),
    ErrorCode(
        "FX603", "CheckpointError", "The checkpoint is of a different model",
        "how_to/shape_mismatch",
        "Names, shapes or dtypes of the tensors, the kinds of optimizers or the structure of "
        "other values differ between the checkpoint and what it is restored into.",
        "Build the model, the optimizer and the template as in the run that saved. To load only "
        "the weights, or under other names, use `fx.load_model(..., rename=...)`.",
    ),
    ErrorCode(
        "FX604", "CheckpointError", "A newer fxtrain wrote the checkpoint", "releases",
        "The format of the checkpoint is newer than this version of fxtrain can read.",
        "Install the version in the message, or a newer one. Newer versions read older formats.",
    ),
    ErrorCode(
        "FX605", "CheckpointError", "Another run saves into this folder",
        "checkpoints#one-run-per-folder",
        "The folder has the lock of a run that still sends heartbeats, or one took over the "
        "lock of this run because it sent none for a while.",
        "Use a folder per run, or end the other one. The lock of a run that was killed expires "
        "by itself.",
    ),
    ErrorCode(
        "FX606", "CheckpointError", "Nothing was saved", "checkpoints#atomic-saves",
        "A rank could not save: its disk is full, its folder is missing, a value cannot be "
        "saved, or the ranks passed different arguments. Earlier checkpoints are intact.",
        "Fix the problem of the ranks in the message and save again.",
    ),
    ErrorCode(
        "FX607", "CheckpointError", "Reading was refused or failed", "checkpoints#remote-storage",
        "The operating system or the storage refused to read: no permission, a lost connection, "
        "a failing disk. The stored data may be intact.",
        "Check permissions and the storage, then try again.",
    ),
    ErrorCode(
        "FX700", "LaunchError", "", "launching",
        "A launch has settings that contradict each other or that the launcher does not "
        "support, or a rank did not finish in time.",
        "Change the option that the message names. `fxtrain launch --dry ...` shows what would "
        "run.",
    ),
    ErrorCode(
        "FX701", "LaunchError", "A port or an address cannot be used", "launching#several-nodes",
        "Another program uses the port through which the ranks connect, this machine may not "
        "listen on it, or the main address cannot be reached.",
        "Choose another `--main-port`, and check that `--main-address` names the machine of "
        "node 0 and that no firewall is between the nodes.",
    ),
    ErrorCode(
        "FX702", "LaunchError", "The program was not found", "launching",
        "The script, module or executable after `fxtrain launch` does not exist or cannot be "
        "run.",
        "Check the path from the current folder; write modules as `-m package.module`, and "
        "programs that are not Python with `--no-python`.",
    ),
    ErrorCode(
        "FX800", "MissingPackageError", "", "start/install#extras",
        "A feature needs an optional package that is not installed, or is installed in a "
        "version that does not work with this torch.",
        "Run the `pip install` command in the message.",
    ),
)  # fmt: skip
