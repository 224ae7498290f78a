"""DeepSpeed's hostfile and its runner's command line, as pure functions."""

import base64
import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.launchers import LaunchSpec, Machine, prepare
from fxtrain.launchers.built_in.deepspeed import filter_hosts, read_hosts

HOSTFILE = """
# two big ones
worker-0 slots=4
worker-1 slots=4   # the second

small slots=1
"""
HOSTS = {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3), "small": (0,)}


def test_a_hostfile_is_read_in_its_order():
    assert list(read_hosts(HOSTFILE).items()) == list(HOSTS.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-0", "not a machine and its slots"),
        ("worker-0 slots=many", "not a machine and its slots"),
        ("a slots=1\na slots=2", "Line 2 .* a appears twice"),
        ("# nothing", "No machine in the hostfile"),
    ],
)
def test_a_hostfile_that_is_none_is_refused(text, words):
    with pytest.raises(fx.errors.LaunchError, match=words):
        read_hosts(text)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("worker-1:2,0@small", "", {"worker-1": (0, 2), "small": (0,)}),
        ("", "worker-0@worker-1:1", {"worker-1": (0, 2, 3), "small": (0,)}),
        ("", "small:0", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
    ],
)
def test_filters_keep_the_order_of_the_hostfile(include, exclude, left):
    assert list(filter_hosts(HOSTS, include, exclude).items()) == list(left.items())


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("small", "worker-0", "Use one"),
        ("nobody", "", "the hostfile has worker-0, worker-1, small"),
        ("small:1", "", "slots 1 of 'small', which has 1"),
        ("worker-0:", "", "not a valid filter"),
        ("worker-0:a", "", "not a valid filter"),
        ("", "worker-0@worker-1@small", "leave no slot"),
    ],
)
def test_filters_that_do_not_fit_are_refused(include, exclude, words):
    with pytest.raises(fx.errors.LaunchError, match=words):
        filter_hosts(HOSTS, include, exclude)


def test_the_command_line_holds_machines_slots_and_words():
    options = {
        "hostfile": "hosts",
        "folder": "/my work",
        "ssh_port": 2222,
        "python": "/env/bin/python",
    }
    spec = LaunchSpec(
        target="train.py", args=("--name", "two words"), launcher="deepspeed", main_port=4711,
        env=("NCCL_DEBUG=INFO", "NOTE=a b"), options=options,
    )  # fmt: skip
    invocation = prepare(spec, Machine(hosts="a slots=3\nb slots=2"))
    argv = invocation.argv
    assert argv[:8] == (
        *("pdsh", "-S", "-f", "1024", "-w", "a,b"),
        "export NCCL_DEBUG=INFO; export NOTE='a b'; ",
        "cd '/my work';",
    )
    assert argv[8:12] == ("/env/bin/python", "-u", "-m", "deepspeed.launcher.launch")
    name, _, world = argv[12].partition("=")
    assert name == "--world_info"
    assert json.loads(base64.urlsafe_b64decode(world)) == {"a": [0, 1, 2], "b": [0, 1]}
    assert argv[13:16] == ("--node_rank=%n", "--master_addr=a", "--master_port=4711")
    assert argv[16:] == ("--no_local_rank", "train.py", "--name", "'two words'")
    assert invocation.env == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 2222"}
    module = attrs.evolve(spec, target="pkg.train", module=True)
    assert "--module" in prepare(module, Machine(hosts="a slots=3\nb slots=2")).argv


NAMES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)


@given(data=st.data(), names=NAMES)
def test_include_and_exclude_split_the_slots_between_them(data, names):
    hosts = {name: tuple(range(data.draw(st.integers(1, 4)))) for name in names}
    chosen = {
        name: data.draw(st.lists(st.sampled_from(slots), unique=True))
        for name, slots in hosts.items()
    }
    words = "@".join(f"{n}:{','.join(map(str, slots))}" for n, slots in chosen.items() if slots)
    kept = filter_hosts(hosts, include=words) if words else {}
    every = all(sorted(chosen[name]) == list(slots) for name, slots in hosts.items())
    rest = {} if every else filter_hosts(hosts, exclude=words)
    for name, slots in hosts.items():
        assert sorted((*kept.get(name, ()), *rest.get(name, ()))) == list(slots)
