"""Blocks of code in Markdown, and what a comment in the line before says of each.

| Comment | The block |
|---|---|
| none | runs after the other blocks of its page, in their namespace, on one rank |
| `<!-- example: name -->` | runs by itself |
| `<!-- prints -->`, `<!-- raises -->` | the next block has what it prints, or its error |
| `<!-- prints: 2 ranks -->` | the same on two ranks, as rank 0 prints it |
| `<!-- file: name -->` | is written to a file of that name |
| `<!-- shell -->` | commands after `$ `, each with its output in the lines below |
| `<!-- not run: reason -->` | is compiled; `make lint` checks its types |

A comment that starts with `setup` holds code that runs before the next block and is not shown;
`<!-- setup training -->` stands for a small model, its data and one step.
`<!-- needs: package -->` anywhere on a page names what its blocks import.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

__all__ = ["Block", "blocks_of", "packages_of", "with_texts"]

_BLOCK = re.compile(
    r"^<!-- setup(?P<setup> training -->|\n.*?-->)$"
    r"|(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_TRAINING = """
import copy

from torch.utils.data import DataLoader, TensorDataset

net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
torch_loader = held_out = DataLoader(data, batch_size=4)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def measures(model, batch):
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}


plan = fx.Plan()
model = fx.wrap(copy.deepcopy(net), ctx, plan, optimizer=adamw)
loader = fx.shard(torch_loader, ctx, plan)
fns = fx.StepFns(model=model, loss=loss)
batch = next(iter(loader))
report = fx.step(ctx, batch, fns)
"""


@attrs.frozen(kw_only=True)
class Block:
    """A block of code of a page.

    Attributes:
        kind: First word of its comment, `setup`, or "" without a comment.
        detail: The rest of its comment.
        language: What follows the backticks.
        text: The code.
        line: Number of its first line in the page, from 1.
        span: Where the code is in the page.
    """

    kind: str
    detail: str
    language: str
    text: str
    line: int
    span: tuple[int, int]

    @property
    def ranks(self) -> int:
        """On how many ranks it runs."""
        found = re.search(r"(\d+) ranks", self.detail)
        return int(found[1]) if found else 1


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page of Markdown, in order."""
    for found in _BLOCK.finditer(page):
        part = "text" if found["setup"] is None else "setup"
        text = found[part].removesuffix("-->")
        kind, _, detail = ("setup" if part == "setup" else found["mark"] or "").partition(":")
        if kind not in ("", "example", "file", "not run", "prints", "raises", "setup", "shell"):
            kind = ""
        yield Block(
            kind=kind,
            detail=detail.strip(),
            language="python" if part == "setup" else found["language"],
            text=_TRAINING if text == " training " else text,
            line=page.count("\n", 0, found.start(part)) + 1,
            span=found.span(part),
        )


def packages_of(page: str) -> list[str]:
    """The packages without which the blocks of a page cannot run."""
    return re.findall(
        r"[\w.]+", ",".join(re.findall(r"^<!-- needs: (.*) -->$", page, re.MULTILINE))
    )


def with_texts(path: Path, texts: dict[Block, str]) -> None:
    """Replace the code of some blocks of a page."""
    page = path.read_text()
    for block, text in sorted(texts.items(), key=lambda pair: -pair[0].span[0]):
        page = page[: block.span[0]] + text + page[block.span[1] :]
    path.write_text(page)
