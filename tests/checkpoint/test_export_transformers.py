"""Models of transformers, made from small configurations: their files and ours are the same."""

import json

import pytest
import torch

import fxtrain as fx
from fxtrain.models import export, load_model
from tests._errors import raises_code
from tests.checkpoint._ranks import ready

transformers = pytest.importorskip("transformers", reason="needs the package transformers")

IDS = torch.arange(12).reshape(2, 6) % 50


def _tiny(kind, *, tied=True, seed=0):
    torch.manual_seed(seed)
    shape = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": tied}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **shape)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **shape)).eval()
    config = transformers.MixtralConfig(**sizes, **shape, num_local_experts=2)
    return transformers.MixtralForCausalLM(config).eval()


def _logits(model):
    with torch.no_grad():
        return model(IDS).logits


KINDS = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False), ("mixtral", False)]


@pytest.mark.parametrize("limit", ["5GB", "3KB"])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_from_pretrained_reads_an_export(tmp_path, kind, tied, limit):
    model = _tiny(kind, tied=tied)
    with fx.detect({}, device="cpu") as ctx:
        files = fx.export(fx.wrap(model, ctx), tmp_path, limit)
    assert (len(files) > 1) == (limit == "3KB")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(_logits(again), _logits(model))
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    body = transformers.AutoModel.from_pretrained(tmp_path)
    hidden = [m(IDS).last_hidden_state for m in (body, model.base_model)]
    assert torch.equal(*hidden)


@pytest.mark.parametrize("limit", ["5GB", "3KB"])
@pytest.mark.parametrize(("kind", "tied"), KINDS[:4])
def test_what_save_pretrained_wrote_is_loaded(tmp_path, kind, tied, limit):
    model, other = _tiny(kind, tied=tied), _tiny(kind, tied=tied, seed=1)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    assert not torch.equal(_logits(other), _logits(model))
    load_model(tmp_path, other)
    assert torch.equal(_logits(other), _logits(model))


def test_the_files_are_those_of_save_pretrained(tmp_path):
    model = _tiny("gpt2")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    export(model, tmp_path / "ours", "3KB")
    names = [sorted(p.name for p in (tmp_path / side).iterdir()) for side in ("theirs", "ours")]
    assert names[0] == names[1]
    index = "model.safetensors.index.json"
    theirs, ours = (json.loads((tmp_path / s / index).read_text()) for s in ("theirs", "ours"))
    assert theirs["weight_map"] == ours["weight_map"]
    assert theirs["metadata"]["total_size"] == ours["metadata"]["total_size"]
    for name in ("config.json", "generation_config.json"):
        texts = [json.loads((tmp_path / s / name).read_text()) for s in ("theirs", "ours")]
        assert texts[0] == texts[1]


def test_half_precision_stays_what_it_is(tmp_path):
    model = _tiny("llama").to(torch.bfloat16)
    export(model, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert torch.equal(_logits(again), _logits(model))
    with raises_code("FX603", "bfloat16", "torch.float32"):
        load_model(tmp_path, _tiny("llama", seed=1))
    other = _tiny("llama", seed=1)
    load_model(tmp_path, other, cast=True)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight.float())


def _export_sharded(ctx, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = _tiny("llama", tied=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    export(model, folder, "3KB", ctx=ctx)
    other = _tiny("llama", tied=False, seed=1)
    for layer in other.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    load_model(folder, other, ctx=ctx)
    return _logits(other)


@pytest.mark.slow
def test_a_model_under_fsdp2_is_one_for_from_pretrained(pair, tmp_path):
    found = ready(pair).run(_export_sharded, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    wanted = _logits(_tiny("llama", tied=False))
    assert torch.equal(_logits(again), wanted)
    for logits in found:
        torch.testing.assert_close(logits, wanted)
