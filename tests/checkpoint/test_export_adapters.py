"""Exports of transformers models with adapters of peft: merged, in peft's format, or refused."""

import contextlib
import importlib.util
import warnings

import pytest
import torch

import fxtrain as fx
from tests._errors import raises_code

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("peft", "transformers"))),
        reason="needs peft and transformers",
    ),
    pytest.mark.slow,  # importing both takes seconds
]
IDS = torch.arange(8)[None]


def _base():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_attention_heads=2, **sizes))


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():  # on ranks too
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # which peft reads
        yield


def _adapted(kind):
    import peft

    config = {
        "lora": peft.LoraConfig(
            r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        ),
        "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    }[kind]
    with _quiet():
        return peft.get_peft_model(_base(), config)


@torch.no_grad()
def _logits(model):
    model.eval()
    return model(IDS).logits


def _exported(ctx, folder):
    import peft
    from transformers import AutoModelForCausalLM

    model = fx.wrap(_adapted("lora"), ctx, fx.Plan(strategy=fx.FSDP()))
    before = _logits(model)
    with fx.gathered(model, ranks="main") as net:
        if net is not None:
            net.save_pretrained(f"{folder}/adapters")
            fx.export(net.merge_and_unload(), f"{folder}/merged")
    assert torch.equal(_logits(model), before)
    with _quiet():
        again = peft.PeftModel.from_pretrained(_base(), f"{folder}/adapters")
    torch.testing.assert_close(_logits(again), before)
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    torch.testing.assert_close(_logits(merged), before)
    return True


def test_both_ways_of_the_page_give_the_same_outputs(pair, tmp_path):
    assert all(pair.run(_exported, str(tmp_path)))


@pytest.mark.parametrize("kind", ["lora", "prompts"])
def test_an_export_that_from_pretrained_would_fill_at_random_is_refused(kind, tmp_path):
    net = _adapted(kind)
    with fx.detect(env={}, device="cpu") as ctx:
        for model in (net, fx.wrap(net, ctx)):
            with raises_code("FX600", "merge_and_unload(), folder)"):
                fx.export(model, tmp_path)
        fx.export(dict(fx.weights(model)), tmp_path, ctx=ctx)
        fx.load_model(tmp_path, _adapted(kind))
    assert not (tmp_path / "config.json").exists()
