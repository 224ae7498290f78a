"""Megatron-core and fxtrain read each other's checkpoints.

Megatron-core's wheel has no CPU path: the fixture answers its calls of CUDA with the CPU.
"""

import argparse
import contextlib
import random
import warnings

import pytest
import torch
from torch import distributed as dist

from fxtrain import ops
from fxtrain.interop import read_checkpoint, write_megatron

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron", reason="needs the package megatron-core")
transformers = pytest.importorskip("transformers", reason="needs the package transformers")

SIZES = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 1}


def _net(kind):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, **SIZES,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=4, n_head=4, n_positions=64, n_inner=32, activation_function="gelu",
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **SIZES,
        )  # fmt: skip
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return net


class _NoTracker:
    def fork(self, *_):
        return contextlib.nullcontext()


@contextlib.contextmanager
def _on_cpu(tensor, pipeline):
    """Megatron's groups over the ranks of the test, and its calls of CUDA on the CPU."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and Apex
        from megatron.core import parallel_state
        from megatron.core import tensor_parallel as parallel

        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
        patch.setattr(parallel, "get_cuda_rng_tracker", _NoTracker)
        alone = not dist.is_initialized()  # a pool of one rank
        if alone:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(tensor, pipeline)
        try:
            yield parallel_state
        finally:
            parallel_state.destroy_model_parallel()
            if alone:
                dist.destroy_process_group()


def _megatron(kind, state, tensor, pipeline):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    llama = kind == "llama"
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32,
        num_query_groups=2 if llama else 4, add_bias_linear=not llama, gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        normalization="RMSNorm" if llama else "LayerNorm", use_cpu_initialization=True,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=config.normalization), 64, 64,
        pre_process=state.is_pipeline_first_stage(), post_process=state.is_pipeline_last_stage(),
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama, parallel_output=False,
    )  # fmt: skip


def _is_equal(folder, net):
    found, wanted = read_checkpoint(folder).models[0], net.state_dict()
    return len(found) >= len(wanted) - 1 and all(
        torch.equal(tensor, wanted[name]) for name, tensor in found.items()
    )


def _both_ways(ctx, kind, tensor, pipeline, folder):
    net = _net(kind)
    if ctx.is_main:
        write_megatron(
            net.state_dict(), net.config.to_dict(), folder / "ours", tensor=tensor,
            pipeline=pipeline, implementation="local", vocab_multiple=32,
        )  # fmt: skip
    ops.barrier(ctx)
    with _on_cpu(tensor, pipeline) as state:
        from megatron.core import dist_checkpointing

        model = _megatron(kind, state, tensor, pipeline).eval()
        rank = f"mp_rank_{state.get_tensor_model_parallel_rank():02d}"
        if pipeline > 1:
            rank += f"_{state.get_pipeline_model_parallel_rank():03d}"
        path = folder / "ours" / "release" / rank / "model_optim_rng.pt"
        ours = torch.load(path, weights_only=False)
        model.load_state_dict(ours["model"], strict=True)
        if tensor * pipeline == 1:
            ids = torch.arange(6)[None]
            mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
            with torch.no_grad():
                got, wanted = model(ids, ids, mask), net(ids).logits
            torch.testing.assert_close(got[..., :60], wanted)
        # As Megatron-LM saves it.
        (folder / "theirs" / "iter_0000007" / rank).mkdir(parents=True)
        random_states = [{"random_rng_state": random.getstate()}]
        contents = {"args": ours["args"], "checkpoint_version": 3.0, "iteration": 7}
        contents |= {"rng_state": random_states, "enum": model.config.attention_backend}
        contents["model"] = model.state_dict_for_save_checkpoint()
        torch.save(contents, folder / "theirs" / "iter_0000007" / rank / path.name)
        (folder / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
        for index, metadata in enumerate(
            [{}, {"singleton_local_shards": True}, {"non_homogeneous_layers": True}]
        ):
            found = dict(model.sharded_state_dict(metadata=metadata))
            found |= {"args": argparse.Namespace(**vars(ours["args"])), "iteration": 7}
            (folder / str(index)).mkdir(exist_ok=True)
            ops.barrier(ctx)
            dist_checkpointing.save(found, str(folder / str(index)))
            ops.barrier(ctx)
    if ctx.is_main:
        return [_is_equal(folder / name, net) for name in ("theirs", "0", "1", "2")]
    return None


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_megatron_core_and_fxtrain_read_each_other(clusters, tmp_path, kind, tensor, pipeline):
    pool = clusters[tensor * pipeline]
    assert pool.run(_both_ways, kind, tensor, pipeline, tmp_path)[0] == [True] * 4
