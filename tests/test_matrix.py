"""The table of docs/strategies.md: which strategy carries out which field of a plan.

It is made from what the strategies' own checks say, so that it cannot go stale.
`python -m tests.test_matrix` writes it into the page.
"""

from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.backends import built_in
from fxtrain.backends.deepspeed import setup
from fxtrain.backends.wrapping import problems_of
from fxtrain.backends.xla import xla_runtime
from fxtrain.state.registry import BUILT_IN
from fxtrain.testing import fake_world
from tests.cluster._models import PIPELINES

PAGE = Path(__file__).parent.parent / "docs" / "strategies.md"
BEGIN, END = "<!-- matrix: made by tests/test_matrix.py -->", "<!-- end of matrix -->"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def encode(self, x):
        return x

    def forward(self, x):
        return x


_TP = fx.TP(
    styles=(
        fx.Style(modules="blocks.*.up", style="colwise"),
        fx.Style(modules="blocks.*.down", style="rowwise"),
    )
)
# Strategy, and the axes of its mesh of 8 ranks.
COLUMNS = {
    "`DDP()`": (fx.DDP(), {"replicate": -1}),
    "`DDP(shard_optimizer)`": (fx.DDP(shard_optimizer=True), {"replicate": -1}),
    "`FSDP()`": (fx.FSDP(), {"replicate": 1, "shard": -1}),
    "`FSDP()`, hybrid": (fx.FSDP(), {"replicate": -1, "shard": 2}),
    "`FSDP(tensor)`": (fx.FSDP(tensor=_TP), {"replicate": 1, "shard": -1, "tensor": 2}),
    "`PP()`": (fx.PP(), {"replicate": -1, "pipeline": 2}),
    "`DeepSpeed()`": (fx.DeepSpeed(), {"replicate": -1}),
    "`XLA()`": (fx.XLA(), {"replicate": -1}),
    "`Offload()`": (fx.Offload(), {"replicate": -1}),
}
# Fields of a plan, and axes of the mesh that they need.
ROWS = {
    "`accumulate`": ({"accumulate": 2}, {}),
    "`accumulate`, `sync_each`": ({"accumulate": 2, "sync_each": True}, {}),
    "`clip_norm`": ({"clip_norm": 1.0}, {}),
    "`clip_value`": ({"clip_value": 1.0}, {}),
    '`nonfinite="skip"`, `"raise"`': ({"nonfinite": "skip"}, {}),
    '`schedule="samples"`, `"ranks"`, `"epoch"`': ({"schedule": "epoch"}, {}),
    '`weigh_by="batches"`': ({"weigh_by": "batches"}, {}),
    '`batch="global"`': ({"batch": "global"}, {}),
    '`even="drop"`': ({"even": "drop"}, {}),
    '`even="uneven"`': ({"even": "uneven"}, {}),
    '`precision="bf16"`': ({"precision": "bf16"}, {}),
    '`precision="fp16"`': ({"precision": "fp16"}, {}),
    '`precision="fp8"`': ({"precision": "fp8"}, {}),
    "`recompute`": ({"recompute": ("Block",)}, {}),
    "`recompute_keep`": ({"recompute": ("Block",), "recompute_keep": ("matmul",)}, {}),
    "`compile`": ({"compile": fx.Compile()}, {}),
    "`compile`, by blocks": ({"compile": fx.Compile(blocks=("Block",))}, {}),
    "`methods`": ({"methods": "encode"}, {}),
    "`methods`, `context=CP()`": (
        {"methods": "encode", "context": fx.CP(causal=True)},
        {"context": 2},
    ),
    "`context=CP()`": ({"context": fx.CP(causal=True)}, {"context": 2}),
    '`quantize="bnb4"`': ({"quantize": "bnb4"}, {}),
    '`frozen="digests"`': ({"frozen": "digests"}, {}),
    "`verify_replicas`, `replicas_differ`": ({"verify_replicas": 9, "replicas_differ": "heal"}, {}),
    "`local=LocalSGD()`": ({"local": fx.LocalSGD(every=4)}, {}),
    "`local=DiLoCo()`": ({"local": fx.DiLoCo(every=4)}, {}),
}


def _problems(strategy, axes, fields):
    entry = built_in(type(strategy))
    with fake_world(8, mesh=fx.Mesh(**axes)) as ctx:
        kind = "xla" if isinstance(strategy, fx.XLA) else "cuda"
        placed = attrs.evolve(ctx, device=torch.device(kind))
        return problems_of(entry, placed, fx.Plan(strategy=strategy, **fields), Net())


def _table():
    reasons: list[str] = []
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, (fields, more) in ROWS.items():
        cells = []
        for strategy, axes in COLUMNS.values():
            problems = _problems(strategy, axes | more, fields)
            for problem in problems[:1]:
                if problem not in reasons:
                    reasons.append(problem)
            cells.append(f"no ({reasons.index(problems[0]) + 1})" if problems else "yes")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes])


def _page():
    """The page, with the table that the checks give."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    with pytest.MonkeyPatch.context() as patch:
        # Checks look whether an engine is installed before they look at a plan.
        patch.setattr(setup, "import_deepspeed", lambda *_, **__: None)
        patch.setattr(setup, "device_problems", lambda *_: ())
        patch.setattr(xla_runtime, "import_xla", lambda *_, **__: None)
        return f"{before}{BEGIN}\n{_table()}\n{END}{rest.partition(END)[2]}"


@PIPELINES
def test_the_table_says_what_the_checks_say():
    assert PAGE.read_text() == _page(), "python -m tests.test_matrix writes the table"


def test_every_strategy_and_field_has_a_place_in_the_table():
    told = {name for fields, _ in ROWS.values() for name in fields}
    # What every strategy reads alike, or what a row of another name covers.
    elsewhere = {"strategy", "flush", "data", "seed", "recompute_every", "profile", "mesh"}
    assert told | elsewhere == {field.name for field in attrs.fields(fx.Plan)}
    kinds = {type(strategy) for strategy, _ in COLUMNS.values()} | {fx.Single}
    assert kinds == set(BUILT_IN)


if __name__ == "__main__":
    PAGE.write_text(_page())
