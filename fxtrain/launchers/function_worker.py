"""The program of a rank of `fx.launch`: becomes like the calling process, and calls the function.

`python function_worker.py FOLDER`, with the file `call` that `launch` has written there. The result
goes to a file beside it.
"""

import multiprocessing
import os
import pickle
import sys
from multiprocessing import spawn
from pathlib import Path


def main(folder: Path) -> None:
    """Carry out the call in a folder."""
    process, call = pickle.loads((folder / "call").read_bytes())
    spawn.prepare(process)
    multiprocessing.current_process().name = f"rank {os.environ['RANK']}"
    from fxtrain._reading import write_file  # sys.path is right now
    from fxtrain.errors import FxError
    from fxtrain.launchers.function import pickle_value

    fn, args = pickle.loads(call)
    try:
        value = fn(*args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        value = None
    try:
        data = pickle_value(value, interactive=True)
    except FxError:  # cloudpickle is missing
        raise
    except Exception as error:
        raise TypeError(f"the return value cannot be sent back: {error}") from error
    write_file(folder / os.environ["LOCAL_RANK"], data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
