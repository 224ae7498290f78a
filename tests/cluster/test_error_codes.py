"""An error has the same code on the rank that raises it and on those that hear of it."""

import pytest

import fxtrain as fx


def _code_of_rank_1(ctx, error):
    with pytest.raises(fx.FxError) as caught:
        fx.ops.raise_together(error if ctx.rank == 1 else None, ctx)
    return type(caught.value), caught.value.message, str(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (fx.CheckpointError("x was changed.", code="FX602"), "FX602"),
        (fx.errors.DataError("Row 7 is empty."), "FX400"),
        (fx.CollectiveError("Another rank failed: [FX400]"), "FX400"),
    ],
    ids=["precise", "class", "quoted"],
)
def test_the_code_of_one_rank_is_that_of_all(pair, error, code):
    (_, heard, told), (kind, raised, own) = pair.run(_code_of_rank_1, error)
    assert kind is type(error) and raised in heard
    assert own == f"{raised} [{code}]" and told == f"{heard} [{code}]"
