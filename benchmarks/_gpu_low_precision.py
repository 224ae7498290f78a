"""One GPU: training in float8, and quantized decoders, each against its library by hand.

python -m benchmarks.gpu float8 quantized
"""

import copy
import importlib.util

import torch

import fxtrain as fx
from benchmarks._common import show
from benchmarks._gpu import (
    DEVICE,
    SMALL,
    detect,
    loop_by_hand,
    loop_by_plan,
    report,
    synchronize,
    timed,
)
from fxtrain.precision.quantizing import stored_tensors
from fxtrain.precision.recipe_layers import recipe_targets

_NEW = 4 if SMALL else 64
_SCALINGS = ("tensorwise", "rowwise")


def _decoder(layers):
    """A Llama of a width at which float8 pays off."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if SMALL:
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=2 if SMALL else layers, use_cache=True, **sizes)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config)


def _missing(part, *packages):
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        print(f"{part}: skipped, {', '.join(absent)} is not installed")
    return bool(absent)


def _plan(recipe):
    precision = fx.Precision(compute="fp8", recipe=recipe) if recipe else "bf16"
    # A rehearsal has no code generation to measure.
    return fx.Plan(precision=precision, clip_norm=1.0, compile=None if SMALL else fx.Compile())


def _float8_by_hand(net, scaling):
    """As the library's documentation converts a model, for the layers that fxtrain converts."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = set(recipe_targets(net, fx.Float8(scaling=scaling))[0])
    config = Float8LinearConfig.from_recipe_name(scaling)
    if SMALL:
        object.__setattr__(config, "emulate", True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: name in names)
    return net if SMALL else torch.compile(net)


def float8():
    """Training in float8 against bf16, and against torchao by hand."""
    if _missing("float8", "torchao", "transformers"):
        return
    tokens = torch.randint(0, 64, (2, 16)) if SMALL else torch.randint(0, 32000, (4, 2048))
    ctx = detect()
    for scaling in _SCALINGS:
        recipe = fx.Float8(scaling=scaling, emulate=SMALL)
        hand = _float8_by_hand(_decoder(4), scaling)
        runs = {
            "bf16, fxtrain": loop_by_plan(ctx, _decoder(4), _plan(None), tokens),
            "float8, by hand": loop_by_hand(hand, tokens.to(DEVICE)),
            "float8, fxtrain": loop_by_plan(ctx, _decoder(4), _plan(recipe), tokens),
        }
        times = timed(runs, rounds=6, each=3)
        size = f"{tokens.shape[0]} rows of {tokens.shape[1]} tokens"
        report(f"float8 {scaling}", f"Llama with 4 layers, {scaling}, {size}", times)
        ratio = times["float8, by hand"] / times["float8, fxtrain"]
        print(f"speed of fxtrain over torchao by hand: {ratio:.3f}")
        if not SMALL:
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def _bitsandbytes(net, record):
    """As its users replace layers; it quantizes when they move to the device."""
    import bitsandbytes as bnb

    for name in [key for key, part in net.named_modules() if type(part) is torch.nn.Linear]:
        part, (parent, _, key) = net.get_submodule(name), name.rpartition(".")
        if name == "lm_head":
            continue
        sizes = {"bias": part.bias is not None}
        if isinstance(record, fx.Bnb8):
            made = bnb.nn.Linear8bitLt(
                part.in_features, part.out_features, has_fp16_weights=False, threshold=6.0, **sizes
            )
        else:
            made = bnb.nn.Linear4bit(
                part.in_features,
                part.out_features,
                quant_type=record.quant_type,
                compute_dtype=torch.bfloat16,
                **sizes,
            )
        made.load_state_dict(part.state_dict())
        setattr(net.get_submodule(parent), key, made.to(DEVICE))
    return net


def _torchao(net, record):
    from torchao import quantization

    names = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}
    quantization.quantize_(
        net,
        getattr(quantization, names[record.weights])(),
        filter_fn=lambda part, name: isinstance(part, torch.nn.Linear) and name != "lm_head",
    )
    return net


_FORMATS = {
    "Bnb4 nf4": (fx.Bnb4(), _bitsandbytes),
    "Bnb4 fp4": (fx.Bnb4(quant_type="fp4"), _bitsandbytes),
    "Bnb8": (fx.Bnb8(), _bitsandbytes),
    "Torchao int8": (fx.Torchao(), _torchao),
    "Torchao float8": (fx.Torchao(weights="float8"), _torchao),
}


def quantized():
    """Tokens per second and memory of a decoder in each format, and of each library by hand."""
    if _missing("quantized", "bitsandbytes", "torchao", "transformers"):
        return
    base = _decoder(16).to(torch.bfloat16).eval()
    rows = [_row(base, "bf16", None, lambda net, _: net)]
    rows += [_row(base, name, record, by_hand) for name, (record, by_hand) in _FORMATS.items()]
    columns = ["format", "fxtrain", "by hand", "fxtrain, GB", "by hand, GB", "ratio of speeds"]
    show("A Llama with 16 layers: tokens per second", columns, rows)


@torch.no_grad()
def _row(base, name, record, by_hand):
    prompt = torch.arange(16, device=DEVICE)[None]
    options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "pad_token_id": 2}
    with detect() as ctx:
        model = fx.wrap(copy.deepcopy(base), ctx, fx.Plan(quantize=record))
        other = by_hand(copy.deepcopy(base), record)
        runs = {
            "by hand": lambda: other.generate(prompt, do_sample=False, **options),
            "fxtrain": lambda: model.module.generate(prompt, do_sample=False, **options),
        }
        times = timed(runs, rounds=8, each=1)
        synchronize()
        report(f"quantized {name}", f"{name}: {_NEW} tokens", times)
        sizes = [_gigabytes(one) for one in (model.module, other)]
        rates = [_NEW / times[which] for which in ("fxtrain", "by hand")]
        fx.unwrap(model)
    return [name, *(f"{one:.1f}" for one in (*rates, *sizes)), f"{rates[0] / rates[1]:.3f}"]


def _gigabytes(module):
    return sum({id(one): one.nbytes for one in stored_tensors(module).values()}.values()) / 1e9
