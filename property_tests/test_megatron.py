"""Megatron's checkpoints: written and read at any sizes, or damaged."""

import argparse
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

import fxtrain as fx
from fxtrain.interop import import_checkpoint, read_checkpoint, write_megatron
from fxtrain.interop.megatron_names import FAMILIES
from tests._damage import damaged, damaged_save, misshapen, only, replaced
from tests._slow import slow_after

# torch says so of pickles that it did not write, and of saving without ranks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
]


@st.composite
def models(draw):
    """Weights by name with no two values alike, their config, and sizes that divide it."""
    kind = draw(st.sampled_from(sorted(FAMILIES)))
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    groups = tensor * draw(st.integers(1, 2))
    heads = groups if kind == "gpt2" else groups * draw(st.integers(1, 3))
    size, vocab, layers = draw(st.integers(1, 3)), draw(st.integers(1, 40)), pipeline * 2
    width, inner = heads * size, tensor * draw(st.integers(1, 3))
    tied = draw(st.booleans())
    values = {
        "num_layers": layers, "hidden_size": width, "ffn_hidden_size": inner,
        "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": size,
        "max_position_embeddings": 5, "norm_epsilon": 1e-5,
    }  # fmt: skip
    family = FAMILIES[kind]
    config = {field: values[name] for name, field in family.fields.items()}
    config |= {"model_type": kind, "tie_word_embeddings": tied}
    qkv, kv = (heads + 2 * groups) * size, groups * size
    shapes = {
        "embed_tokens.weight": (vocab, width), "wte.weight": (vocab, width),
        "lm_head.weight": (vocab, width), "wpe.weight": (5, width),
        "q_proj.weight": (width, width), "k_proj.weight": (kv, width), "v_proj.weight": (kv, width),
        "q_proj.bias": (width,), "k_proj.bias": (kv,), "v_proj.bias": (kv,),
        "o_proj.weight": (width, width), "gate_proj.weight": (inner, width),
        "up_proj.weight": (inner, width), "down_proj.weight": (width, inner),
        "c_attn.weight": (width, qkv), "c_attn.bias": (qkv,), "c_fc.weight": (width, inner),
        "c_fc.bias": (inner,), "attn.c_proj.weight": (width, width),
        "mlp.c_proj.weight": (inner, width),
    }  # fmt: skip
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    tensors, first = {}, 0
    for row in family.rows:
        for name in row.names:
            for layer in range(layers if "{}" in name else 1):
                ends = [one for end, one in shapes.items() if name.endswith(end)]
                shape = ends[0] if ends else (width,)
                count = torch.Size(shape).numel()
                tensors[name.format(layer)] = (
                    torch.arange(first, first + count).to(dtype).view(shape)
                )
                first += count
    if tied:
        del tensors[family.tied[0]]
    return tensors, config, tensor, pipeline


@given(model=models(), multiple=st.integers(1, 7), local=st.booleans())
def test_any_split_is_read_back(folder, model, multiple, local):
    tensors, config, tensor, pipeline = model
    made = folder / "megatron"
    shutil.rmtree(made, ignore_errors=True)
    write_megatron(
        tensors,
        config,
        made,
        tensor=tensor,
        pipeline=pipeline,
        implementation="local" if local else "transformer_engine",
        vocab_multiple=multiple,
    )
    assert len(list((made / "release").iterdir())) == tensor * pipeline
    found = read_checkpoint(made)
    assert found.models[0].keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert found.models[0][name].dtype == wanted.dtype
        assert torch.equal(found.models[0][name], wanted), name
    vocab = next(
        len(t) for name, t in tensors.items() if name.endswith(("tokens.weight", "wte.weight"))
    )
    assert found.config["vocab_size"] == vocab
    assert all(found.config.get(field) == value for field, value in config.items())


def _small():
    family = FAMILIES["llama"]
    config = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "intermediate_size": 4, "tie_word_embeddings": True}
    shapes = {"weight": (4, 4), "norm.weight": (4,), "layernorm.weight": (4,)}
    names = [n for row in family.rows for n in row.names if n != "lm_head.weight"]
    tensors = {
        name.format(layer): torch.ones([s for end, s in shapes.items() if name.endswith(end)][-1])
        for name in names
        for layer in range(2)
    }
    return tensors, config


@pytest.fixture(scope="module")
def legacy(folder):
    made = folder / "legacy"
    write_megatron(*_small(), made, tensor=2, pipeline=2, vocab_multiple=2)
    path = made / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    contents = torch.load(path, weights_only=False)
    contents["args"] = vars(contents["args"])
    assert read_checkpoint(made).models[0].keys() == _small()[0].keys()
    return made, path, contents


def _import(source):
    import_checkpoint(source, source.parent / "imported", optimizer=False)


@given(data=st.data())
def test_a_damaged_rank_is_read_or_refused(legacy, data):
    made, path, contents = legacy
    with replaced(path, lambda raw: data.draw(damaged_save(raw, contents))):
        only(fx.CheckpointError, read_checkpoint, made)
        only(fx.CheckpointError, _import, made)


@given(data=st.data())
def test_damaged_arguments_are_read_or_refused(legacy, data):
    made, path, contents = legacy
    first = path.parent.parent / "mp_rank_00_000" / path.name
    contents = torch.load(first, weights_only=False)
    args = data.draw(misshapen(vars(contents["args"])))
    if isinstance(args, dict):
        found, args = args, argparse.Namespace()
        vars(args).update((str(name), value) for name, value in found.items())

    def change(_):
        torch.save({**contents, "args": args}, folder_file)
        return folder_file.read_bytes()

    folder_file = made / "changed.pt"
    with replaced(first, change):
        only(fx.CheckpointError, read_checkpoint, made)


@given(data=st.data())
def test_a_damaged_name_of_the_latest_is_read_or_refused(legacy, data):
    made = legacy[0]
    with replaced(made / "latest_checkpointed_iteration.txt", lambda raw: data.draw(damaged(raw))):
        only(fx.CheckpointError, read_checkpoint, made)


@pytest.fixture(scope="module")
def sharded(folder):
    """A folder in `torch_dist`, whose layers are stacked."""
    tensors, config = _small()
    one = folder / "one"
    write_megatron(tensors, config, one, implementation="local", vocab_multiple=2)
    contents = torch.load(one / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    stacked = {}
    for name, tensor in contents["model"].items():
        key = name.replace("layers.0.", "layers.")
        if "layers.1." not in name:
            other = name.replace("layers.0.", "layers.1.")
            stacked[key] = (
                torch.stack([tensor, contents["model"][other]]) if key != name else tensor
            )
    made = folder / "sharded"
    dcp.save(stacked, checkpoint_id=made, no_dist=True)
    (made / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": contents["args"], "iteration": 3}, made / "common.pt")
    return made


def test_torch_dist_is_read(sharded):
    found = read_checkpoint(sharded)
    assert found.updates == 3 and found.models[0].keys() == _small()[0].keys()


@settings(max_examples=30)
@pytest.mark.parametrize("name", slow_after(1, [".metadata", "__0_0.distcp", "common.pt"]))
@given(data=st.data())
def test_damaged_torch_dist_is_read_or_refused(sharded, name, data):
    with replaced(sharded / name, lambda raw: data.draw(damaged(raw))):
        only(fx.CheckpointError, read_checkpoint, sharded)
        only(fx.CheckpointError, _import, sharded)
