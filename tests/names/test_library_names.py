"""Every public name of Accelerate, Fabric and `TrainingArguments` has a row in the table."""

from pathlib import Path

import attrs
import pytest

import fxtrain as fx
from docs._sphinx.site_names import with_names
from fxtrain._other_names import call_hint, other_names, setting
from fxtrain.interop.accelerate_config import RULES
from fxtrain.launchers import LaunchSpec
from tests.names._library_names import installed_names, snapshot

ROOT = Path(__file__).parents[2]
LIBRARIES = ("accelerate", "lightning", "transformers")
# What has the same name and meaning here.
OWN = {
    "argument": {*attrs.fields_dict(fx.Plan)},
    "flag": {"help", "precision", *attrs.fields_dict(LaunchSpec)},
    "key": {*attrs.fields_dict(LaunchSpec), *attrs.fields_dict(fx.Plan)},
    "class": {*fx.__all__, *fx.ops.__all__},
    "method": {*attrs.fields_dict(fx.DistContext)},
}


def _missing(library, kinds):
    """Names without an answer where they are typed."""
    owned = {row.name.rpartition(".")[2] for row in other_names()}
    return [
        f"{kind} {name}"
        for kind, names in kinds.items()
        for name in names
        if name.replace("-", "_") not in owned
        and name.replace("-", "_") not in OWN[kind]
        and not (call_hint(name) if kind in ("class", "method") else setting(name))
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_has_a_row(library):
    assert _missing(library, snapshot(library)) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_the_installed_version_has_a_row(library):
    names = installed_names(library)
    if names is None:
        pytest.skip(f"{library} is not installed")
    assert sum(map(len, names.values())) > 50
    assert _missing(library, names) == []


def test_every_key_that_config_convert_knows_has_a_row():
    prefixes = {"fsdp": "fsdp_", "fp8": "fp8_", "dynamo": "dynamo_", "parallelism": ""}
    prefixes |= {"megatron_lm": "megatron_lm_", "ipex": "", "mpirun": "mpirun_", "deepspeed": ""}
    keys = [key.rpartition(".") for key in RULES]
    names = [
        f"{prefixes.get(section, '')}{key}"
        for section, _, key in keys
        if section not in ("ipex", "fp8", "estimator")
    ]
    assert _missing("accelerate", {"key": [*names, "main_training_function"]}) == []


def test_the_page_has_every_row():
    page = with_names((ROOT / "docs/names.md").read_text())
    for row in other_names():
        name = row.name.rpartition(".")[2]
        assert row.kind == "value" or f"`{name}`" in page or f"`--{name}`" in page
        assert row.none in page
    assert '| `even_batches`, `join_uneven_inputs` | `fx.Plan(even="uneven")` |' in page
