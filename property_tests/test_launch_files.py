"""Launch files: whatever they hold, they are read or refused; what is written is read again."""

import json
import string

import click
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.cli.questions import MachineFacts, interview
from fxtrain.interop.accelerate_config import _SECTIONS, _TYPES, RULES, convert_accelerate
from fxtrain.launchers.config import LaunchConfig, launch_config, render
from fxtrain.state.parsing import parse_text
from tests.cli._files import GOOD

WORDS = st.sampled_from(
    ["launch", "plan", "options", "ranks", "args", "strategy", "kind", "ddp", "bf16",
     "precision", "data", "source", "hook", "compile", "blocks", "seed", ""]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), WORDS,
    st.dates(), st.binary(max_size=3),
)  # fmt: skip
DATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(WORDS, st.text(max_size=3), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


def _a_file_or_an_error(text, form):
    try:
        assert isinstance(launch_config(parse_text(text, form)), LaunchConfig)
    except fx.PlanError as error:
        assert str(error)


@given(data=DATA)
def test_any_yaml_is_a_file_or_an_error(data):
    _a_file_or_an_error(yaml.safe_dump(data, allow_unicode=True), "yaml")


@given(data=st.dictionaries(WORDS, DATA, max_size=4))
def test_any_json_is_a_file_or_an_error(data):
    _a_file_or_an_error(json.dumps(data, default=str), "yaml")


@given(text=st.text(alphabet=string.printable + "äß\0\ud800", max_size=60))
@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_any_text_is_a_file_or_an_error(form, text):
    _a_file_or_an_error(text, form)


@given(cut=st.integers(0, len(GOOD)), put=st.text(alphabet="[]={}\"'\n.#x1", max_size=4))
def test_a_file_with_a_slip_is_a_file_or_an_error(cut, put):
    _a_file_or_an_error(GOOD[:cut] + put + GOOD[cut + len(put) :], "toml")


NAMES = st.text(min_size=1, max_size=8)
VALUES_OF_FILES = st.fixed_dictionaries(
    {
        "launch": st.fixed_dictionaries(
            {},
            optional={
                "ranks": st.integers(1, 64),
                "args": st.lists(
                    st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8"))
                ),
                "target": st.just("a.py"),
            },
        ),
        "plan": st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(-(2**63), 2**63 - 1),
                "flush": st.booleans(),
                "clip_norm": st.floats(1e-9, 1e9),
                "recompute": st.lists(NAMES.filter(lambda name: "\0" not in name)),
                "precision": st.sampled_from(["fp32", "bf16", {"compute": "fp16"}]),
                "strategy": st.sampled_from(
                    [{"kind": "single"}, {"kind": "ddp", "hook": {"name": "fp16"}}]
                ),
                "compile": st.fixed_dictionaries({"blocks": st.lists(st.sampled_from("AB"))}),
            },
        ),
    }
)


@given(values=VALUES_OF_FILES, brief=st.booleans())
@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_what_is_written_is_read_again(form, values, brief):
    text = render(values, form, notes=["A head."], brief=brief)
    assert launch_config(parse_text(text, form)).values == values


KEYS = st.sampled_from([*_SECTIONS, *RULES, "distributed_type", "dynamo_backend"])
VALUES = st.one_of(
    LEAVES,
    st.integers(-1, 9),
    st.lists(st.text(max_size=3), max_size=2),
    st.sampled_from(["yes", "no", "all", "FULL_SHARD", "cpu", "fp16", "static"]),
)
SECTION_KEYS = st.sampled_from([key.partition(".")[2] for key in RULES if "." in key])
OLD = st.dictionaries(
    KEYS, st.one_of(VALUES, st.dictionaries(SECTION_KEYS, VALUES, max_size=4)), max_size=6
)


@given(data=OLD, kind=st.sampled_from(_TYPES))
def test_any_accelerate_config_is_a_launch_file_or_an_error(data, kind):
    try:
        values = convert_accelerate({**data, "distributed_type": kind})[0]
    except fx.PlanError as error:
        assert str(error)
    else:
        text = render(values, "toml")
        assert launch_config(parse_text(text, "toml")).values == values


MACHINES = st.builds(
    MachineFacts,
    cores=st.integers(1, 64),
    count=st.integers(0, 8),
    bf16=st.booleans(),
    slurm=st.booleans(),
    tpu=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=25)
@given(machine=MACHINES, data=st.data())
def test_any_answers_lead_to_a_file_in_order(machine, data):
    """Each question comes once, and what comes out is accepted by the reader."""
    asked = []

    def ask(path, text, read):
        asked.append(path)
        lines = text.splitlines()
        choices = [line.strip().partition(":")[0] for line in lines if line.startswith("  ")]
        yes_or_no = lines[-1] in (" [yes]", " [no]")
        likely = choices or (["yes", "no"] if yes_or_no else ["1", "2", "2.5"])
        while True:
            try:
                return read(data.draw(st.sampled_from(["", *likely])))
            except click.UsageError:
                continue

    values = interview(machine, ask)
    assert len(asked) == len(set(asked))
    assert launch_config(parse_text(render(values, "toml"), "toml")).values == values
