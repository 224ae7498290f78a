"""Megatron's checkpoints: converted to models of transformers, and what is refused."""

import shutil

import pytest
import torch

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.interop import read_checkpoint, write_megatron
from tests._errors import raises_code
from tests.checkpoint._imports import Bomb

transformers = pytest.importorskip("transformers", reason="needs the package transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(12).reshape(2, 6) % 50


def _net(kind, *, tied=True):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "n_positions": 16}
        sizes |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        sizes = SIZES
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, **sizes
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _written(net, folder, **sizes):
    return write_megatron(net.state_dict(), net.config.to_dict(), folder, **sizes)


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_a_model_of_transformers_comes_back(tmp_path, kind, tied):
    net = _net(kind, tied=tied)
    _written(net, tmp_path / "megatron", tensor=2, pipeline=2)
    state = read_checkpoint(tmp_path / "megatron")
    config = transformers.AutoConfig.for_model(**state.config)
    torch.manual_seed(1)
    again = transformers.AutoModelForCausalLM.from_config(config).eval()
    fx.load_model(state.models[0], again)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, net(IDS).logits)


def test_the_command_converts_to_files_of_transformers(tmp_path, capsys):
    net = _net("llama", tied=False)
    _written(net, tmp_path / "megatron", pipeline=2)
    folder = str(tmp_path / "megatron")
    assert main(["import", folder, str(tmp_path / "runs")]) == 2
    assert "--no-optimizer" in capsys.readouterr().err
    assert main(["import", folder, str(tmp_path / "runs"), "--no-optimizer"]) == 0
    assert main(["merge-weights", str(tmp_path / "runs"), str(tmp_path / "hf")]) == 0
    net.config.save_pretrained(tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, net(IDS).logits)


def _change(folder, rank, change):
    path = folder / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt"
    contents = torch.load(path, weights_only=False)
    change(contents)
    torch.save(contents, path)


def test_objects_in_the_files_stay_inert(tmp_path):
    net = _net("llama")
    _written(net, tmp_path)

    def change(contents):
        contents["args"].bomb = Bomb(str(tmp_path / "owned"))
        contents["rng_state"] = [{"numpy": __import__("numpy").random.get_state()}]

    _change(tmp_path, "00", change)
    with raises_code("FX600", "posix"):
        read_checkpoint(tmp_path)
    _change(tmp_path, "00", lambda contents: delattr(contents["args"], "bomb"))
    assert read_checkpoint(tmp_path).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    shutil.rmtree(tmp_path / "owned")  # only torch.load without weights_only made it


def test_virtual_stages_follow_each_other_in_turn(tmp_path):
    net = _net("llama")
    _written(net, tmp_path, pipeline=2)
    layers = {}
    for stage in range(2):
        _change(tmp_path, f"00_{stage:03d}", lambda c, s=stage: layers.update({s: c["model"]}))

    def of_layer(stage, layer, new):
        start = f"decoder.layers.{layer}."
        return {
            f"decoder.layers.{new}.{name.removeprefix(start)}": tensor
            for name, tensor in layers[stage].items()
            if name.startswith(start)
        }

    ends = [{n: t for n, t in layers[s].items() if ".layers." not in n} for s in range(2)]
    chunks = [
        [{**ends[0], **of_layer(0, 0, 0)}, of_layer(1, 0, 0)],
        [of_layer(0, 1, 0), {**ends[1], **of_layer(1, 1, 0)}],
    ]

    def change(contents, stage):
        del contents["model"]
        contents.update(model0=chunks[stage][0], model1=chunks[stage][1])

    for stage in range(2):
        _change(tmp_path, f"00_{stage:03d}", lambda c, s=stage: change(c, s))
    found = read_checkpoint(tmp_path)
    for name, tensor in net.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(found.models[0][name], tensor), name


def _experts(contents):
    contents["model"]["decoder.layers.0.mlp.router.weight"] = torch.ones(2, 16)


def _apart(contents):
    contents["model"]["decoder.final_layernorm.weight"] += 1


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        ("01_001", _apart, "different values of decoder.final_layernorm"),
        ("00_000", _experts, "mlp.router.weight.*which none of the families"),
        ("00_000", lambda c: vars(c["args"]).update(apply_layernorm_1p=True), "layernorm_1p=True"),
        ("00_000", lambda c: vars(c["args"]).update(num_layers=3), "more than 3 layers"),
        ("00_000", lambda c: vars(c["args"]).update(num_layers=10**12), "fewer than"),
        ("00_000", lambda c: vars(c["args"]).update(num_layers=None), "num_layers is None"),
        (
            "00_000",
            lambda c: vars(c["args"]).update(tensor_model_parallel_size=2**62),
            "files of the ranks 2/0, 2/1, 3/0, 3/1, 4/0 are missing",
        ),
        ("00_000", lambda c: c.update(model={"language_model": {}}), "--use-legacy-models"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, rank, change, message):
    _written(_net("llama"), tmp_path, tensor=2, pipeline=2)
    _change(tmp_path, rank, change)
    with pytest.raises(fx.CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_a_missing_rank_is_named(tmp_path):
    made = _written(_net("llama"), tmp_path, tensor=2, pipeline=2)
    shutil.rmtree(made / "mp_rank_01_001")
    with raises_code("FX600", "1/1"):
        read_checkpoint(tmp_path)
    (made / "mp_rank_00_000").rename(made / "mp_rank_00_000_000")
    with raises_code("FX600", "expert parallelism"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"tensor": 3}, "num_attention_heads is 4, which 3 ranks"),
        ({}, {"pipeline": 3}, "num_layers is 4, which 3 ranks"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 3}, {}, "has no tensor .model.layers.3"),
        ({"num_hidden_layers": 5}, {}, "has a tensor .model.layers.4"),
        ({"num_key_value_heads": 4}, {}, "shapes of the tensors"),
    ],
)
def test_models_that_cannot_be_written_are_refused(tmp_path, changes, sizes, message):
    net = _net("llama")
    with pytest.raises(fx.CheckpointError, match=message):
        write_megatron(net.state_dict(), net.config.to_dict() | changes, tmp_path / "a", **sizes)
    assert not (tmp_path / "a" / "release").exists()


def test_an_earlier_checkpoint_is_kept(tmp_path):
    net = _net("llama")
    _written(net, tmp_path)
    with raises_code("FX600", "release"):
        _written(net, tmp_path)
    assert read_checkpoint(tmp_path / "release", args={"vocab_size": 40}).config["vocab_size"] == 40
