"""`fx.launch` on several nodes, with restarts, and where it cannot work."""

import json
import sys
import types

import pytest

import fxtrain as fx
from fxtrain.errors import LaunchError
from fxtrain.testing import free_port
from tests._errors import raises_code
from tests.launched._run import PYTHON, finish, start_fork

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NODE = """
import json, os, sys
import fxtrain as fx

def train(folder, failing):
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        mark = os.path.join(folder, "failed")
        if ctx.rank == failing and not os.path.exists(mark):
            open(mark, "x").close()
            raise ValueError("of my own")
        places = fx.ops.gather_objects((ctx.rank, ctx.local_rank, ctx.node_rank), ctx)
        return ctx.rank, places

node, port, restarts, failing, folder = sys.argv[1:]
print(json.dumps(fx.launch(
    train, (folder, int(failing)), ranks=2, nodes=2, node_rank=int(node), restarts=int(restarts),
    main_address="127.0.0.1", main_port=int(port), connect_timeout_s=600, timeout_s=600,
)))
"""
EVERYONE = [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]


def _two_nodes(tmp_path, *, restarts, failing):
    port = str(free_port())
    script = tmp_path / "node.py"
    script.write_text(_guarded(NODE))
    words = (port, str(restarts), str(failing), str(tmp_path))
    nodes = [start_fork(*PYTHON, str(script), str(number), *words) for number in (1, 0)]
    return [finish(node, timeout_s=200) for node in reversed(nodes)]


def _guarded(text):
    head, tail = text.split("node, port", 1)
    body = f"node, port{tail}".replace("\n", "\n    ")
    return f'{head}if __name__ == "__main__":\n    {body}'


def test_all_nodes_start_again_when_a_rank_of_one_failed(tmp_path):
    first, second = _two_nodes(tmp_path, restarts=1, failing=3)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (tmp_path / "failed").exists()
    assert json.loads(first.out) == [[0, EVERYONE], [1, EVERYONE]]
    assert json.loads(second.out) == [[2, EVERYONE], [3, EVERYONE]]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"nodes": 2}, "2 nodes need an address to connect to"),
        (
            {"nodes": 2, "node_rank": 1, "main_address": "127.0.0.1", "main_port": 1,
             "connect_timeout_s": 0.3},
            "Node 1 of 2 could not reach the main address 127.0.0.1:1 (attempts: 1",
        ),
    ],
)  # fmt: skip
def test_wrong_nodes(kwargs, text):
    with pytest.raises(LaunchError) as caught:
        fx.launch(divmod, (7, 2), ranks=1, **kwargs)
    assert text in str(caught.value)


def test_a_session_that_has_used_a_tpu_is_told_so(monkeypatch):
    used = types.SimpleNamespace(_XLAC=types.SimpleNamespace(_xla_runtime_is_initialized=lambda: 1))
    monkeypatch.setitem(sys.modules, "torch_xla", used)
    with raises_code("FX700", "XLA"):
        fx.launch(divmod, (7, 2), ranks=1)
