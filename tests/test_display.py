"""What records print: one line with what matters, and never the contents of tensors."""

import copy
import io
import pickle

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import checkpoint, interop, meters, state
from fxtrain._display import brief

MODULES = (fx, fx.ops, state, checkpoint, interop, meters)
RECORDS = sorted(
    {
        one
        for module in MODULES
        for one in (getattr(module, name) for name in module.__all__)
        if isinstance(one, type) and attrs.has(one)
    },
    key=lambda one: one.__name__,
)
# Records of one rank's machinery, that users neither get nor print.
INTERNAL = {"AccumulationWindow", "Comm", "CommState", "ModelStatus", "Strategy"}


def _widths(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.fixture(scope="module")
def shown():
    """The records that a loop holds, by name."""
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(
            torch.nn.Linear(512, 10), ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        rows = TensorDataset(torch.zeros(20, 512), torch.zeros(20, dtype=torch.int64))
        loader = fx.shard(DataLoader(rows, batch_size=8), ctx)
        fns = fx.StepFns(
            model, lambda m, b: (m(b[0]).mean(), {"logits": torch.zeros(8, 512), "name": "a"})
        )
        batches = list(loader)
        report = fx.step(ctx, batches[0], fns)
        yield {
            "ctx": ctx,
            "model": model,
            "loader": loader,
            "batch": batches[-1],
            "report": report,
            "weighted": fx.Weighted(torch.tensor(2.0), 3),
            "mean": fx.Mean().update(report),
            "fns": fns,
        }


def test_one_line_says_what_matters(shown):
    assert repr(shown["ctx"]) == "DistContext(rank 0 of 1 on cpu)"
    assert repr(shown["model"]) == "Wrapped(Linear, DDP, fp32, SGD, rank 0 of 1 on cpu)"
    assert repr(shown["batch"]) == (
        "Batch([float32[4, 512], int64[4]], 4 rows on cpu, epoch 0, index 20, update 3, end of the "
        "epoch)"
    )
    assert repr(shown["loader"]) == (
        "Sharded(TensorDataset, 3 batches left of 8 rows per rank, epoch 0, index 0, update 0, "
        "rank 0 of 1 on cpu)"
    )
    assert repr(shown["loader"].epochs(2)) == f"epochs(2) of {shown['loader']!r}"
    assert repr(shown["weighted"]) == "Weighted(total=2, weight=3)"
    loss = f"{shown['report'].loss.item():.4g}"
    assert repr(shown["report"]) == (
        f"Report(loss {loss}, weight 8, update applied, at epoch 0, index 8, update 1, "
        "aux {logits: float32[8, 512], name: 'a'})"
    )


@pytest.mark.parametrize("name", ["ctx", "loader"])
def test_what_belongs_to_a_context_says_why_it_cannot_be_pickled(shown, name):
    """Records of rows and positions can be; a copy of what holds a context refers to the same."""
    with pytest.raises(TypeError, match=r"A context cannot be pickled.*call fx\.detect\(\)"):
        pickle.dumps(shown[name])
    assert copy.deepcopy({"ctx": shown["ctx"]})["ctx"] is shown["ctx"]
    for value in (fx.Plan(), shown["batch"].position):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("name", ["ctx", "model", "loader", "batch", "report", "weighted", "mean"])
def test_every_form_is_short(shown, name):
    one = shown[name]
    assert "\n" not in repr(one) and len(repr(one)) < 250
    out = io.StringIO()
    Console(width=100, file=out, force_terminal=False).print(one)
    text = out.getvalue()
    assert "tensor(" not in text and _widths(text) <= 100 and len(text) < 900
    if hasattr(one, "_repr_html_"):
        html = one._repr_html_()
        assert html.startswith("<table>") and "tensor(" not in html and len(html) < 3000


def test_padding_and_an_unknown_length_are_said(shown):
    batch = attrs.evolve(shown["batch"], rows=(2, 1), sizes=(2, 2))
    assert "3 rows of 2 ranks and 1 of padding on cpu" in repr(batch)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(5))

    loader = fx.shard(DataLoader(Endless()), shown["ctx"])
    assert "Sharded(Endless, unknown length" in repr(loader)


def test_a_plan_prints_what_differs_from_the_default():
    assert repr(fx.Plan()) == "Plan()"
    plan = fx.Plan(strategy="fsdp", accumulate=4, recompute="Block")
    assert repr(plan) == "Plan(strategy=FSDP(), accumulate=4, recompute=('Block',))"
    curve = fx.tuning.RateCurve(rates=tuple(map(float, range(1, 101))), losses=(0.5,) * 100)
    assert repr(curve) == (
        "RateCurve(rates=(1.0, 2.0, 3.0, ... 97 more), losses=(0.5, 0.5, 0.5, ... 97 more))"
    )
    assert "<td style='text-align: left'>4</td>" in plan._repr_html_()


@given(
    st.builds(
        fx.Plan,
        accumulate=st.integers(1, 9),
        clip_norm=st.none() | st.floats(0.1, 9),
        recompute=st.lists(st.text("ab_<&", min_size=1, max_size=3), max_size=5),
        strategy=st.builds(fx.FSDP, shard=st.none() | st.integers(1, 4)) | st.just(fx.Single()),
    )
)
def test_the_line_of_a_plan_builds_it_again(plan):
    names = {name: getattr(fx, name) for name in ("Plan", "FSDP", "Single", "Precision")}
    assert eval(repr(plan), names) == plan
    assert "<&" not in plan._repr_html_()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_no_record_prints_the_contents_of_tensors(record):
    code = record.__repr__.__code__
    written = "attrs generated" not in code.co_filename and "_display" not in code.co_filename
    if written or record.__name__ in INTERNAL:
        return
    holds = [
        field.name
        for field in attrs.fields(record)
        if field.repr is True and "Tensor" in str(field.type) and "Callable" not in str(field.type)
    ]
    assert not holds, f"{record.__name__} prints {holds}: use attrs.field(repr=describe)"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=30,
    )
)
def test_any_tree_has_a_description_of_bounded_length(tree):
    assert len(brief(tree)) < 6**3 * 100
    assert brief({"x": torch.zeros(1000)}) == "{x: float32[1000]}"
