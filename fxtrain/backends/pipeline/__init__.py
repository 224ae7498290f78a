"""Pipeline parallelism: torch.distributed.pipelining.

Every rank runs the user's loss function and the model's forward unchanged, and leaves each of them
where another rank continues:

    every rank    loss(model, batch) ──► model(x)    1. ends with _ModelCalled; x is kept
                                          │
    first stage   forward(x): block 0, block 1       2. ends with _StageEnd where block 2 is
                                          │             entered, whose arguments are sent
                                          │
    last stage    forward(x): no values until        3. block 2 is entered with the tensors
                  block 2, block 3, head                received; the outputs are returned
                                          │
                  loss(model, batch) ──► model(x)    4. runs again; model(x) returns the outputs
                                          │
    every rank    loss, weight and aux               5. are broadcast by the last stage

1. Only the loss function knows the arguments of the model's forward. So it runs up to its call of
   the model, which raises `_ModelCalled` (`strategy.py`).
2. Each stage runs the whole forward, on a copy of the model's structure (`stage.py`). A hook on the
   next stage's first module raises `_StageEnd`; its arguments are this stage's outputs.
3. A hook on the stage's own first module replaces its arguments by the received tensors. Everything
   before it that depends on other stages' parameters has a shape, but no values.
4. On the last stage the loss function runs a second time, with the same random numbers. Its call of
   the model returns the outputs (`_computed_loss`), and backward starts from its result.
5. See `broadcast_loss` (`strategy.py`).

Both exceptions derive from BaseException, so that an `except Exception` in a loss function or in a
model does not catch them.
"""

__all__: list[str] = []
