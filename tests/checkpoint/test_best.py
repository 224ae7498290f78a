"""`fx.checkpoint.best`: the checkpoint with the best metric, of those that are complete."""

import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from tests._errors import raises_code

METRICS = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=1, max_size=6)


def _save(folder, metrics):
    """A checkpoint for each metric; their paths."""
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(1, 1), ctx)
        return [
            fx.save(folder, ctx, model, position=fx.Position(updates=update), metric=metric).path
            for update, metric in enumerate(metrics)
        ]


@settings(max_examples=15, deadline=None)
@given(METRICS)
def test_the_newest_with_the_best_metric(metrics):
    with tempfile.TemporaryDirectory() as folder:
        paths = _save(folder, metrics)
        known = [(metric, number) for number, metric in enumerate(metrics) if metric is not None]
        for mode, sign in (("min", -1), ("max", 1)):
            wanted = max(((sign * metric, number) for metric, number in known), default=None)
            assert fx.checkpoint.best(folder, mode) == (wanted and paths[wanted[1]])


def test_a_truncated_one_is_skipped(tmp_path):
    paths = _save(tmp_path, [2.0, 1.0, 3.0])
    data = next((tmp_path / "update-0000000001").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    assert fx.checkpoint.best(tmp_path) == paths[0]


def test_another_word_is_an_error(tmp_path):
    with raises_code("FX600", "best(mode='maximum')", "'min'", "'max'"):
        fx.checkpoint.best(tmp_path, "maximum")


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert fx.checkpoint.best(tmp_path) is None
