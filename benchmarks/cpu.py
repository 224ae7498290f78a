"""What makes a CPU compute faster: bf16, channels-last, inductor with prepacked weights.

python -m benchmarks.cpu

Inference of a convolutional network and of a transformer encoder, under plans of fxtrain. All
variants take turns, on the threads that torch chooses. Compiling needs a C++ compiler.
"""

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import interleaved, show

ROUNDS = 7
PLANS = {
    "fp32": fx.Plan(),
    "bf16": fx.Plan(precision="bf16"),
    "fp32, compiled": fx.Plan(compile=fx.Compile()),
    "fp32, compiled, prepacked": fx.Plan(compile=fx.Compile(prepack=True)),
    "bf16, compiled": fx.Plan(precision="bf16", compile=fx.Compile()),
    "bf16, compiled, prepacked": fx.Plan(precision="bf16", compile=fx.Compile(prepack=True)),
}


def _convolutions():
    layers = []
    for width, before in ((32, 3), (64, 32), (128, 64), (128, 128)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _encoder():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def main() -> None:
    """Print the tables."""
    torch.manual_seed(0)
    images, rows = torch.randn(4, 3, 64, 64), torch.randn(4, 64, 256)
    with fx.detect(env={}, device="cpu") as ctx, torch.no_grad():
        runs = {}
        for name, plan in PLANS.items():
            for form in ("", ", channels-last"):
                net, x = _convolutions().eval(), images
                if form:
                    net, x = (one.to(memory_format=torch.channels_last) for one in (net, x))
                runs[name + form] = _run(fx.wrap(net, ctx, plan), x)
        _table("Four convolutions, 4 images of 64 x 64", runs)
        runs = {n: _run(fx.wrap(_encoder().eval(), ctx, plan), rows) for n, plan in PLANS.items()}
        _table("Three encoder layers of width 256, 4 x 64 tokens", runs)


def _run(model, x):
    def run() -> None:
        model(x)

    run(), run()  # the first compiles
    return run


def _table(title, runs) -> None:
    times = interleaved(runs, rounds=ROUNDS, each=2)
    base = times["fp32"]
    rows = [[name, f"{1e3 * t:.1f}", f"{base / t:.2f}"] for name, t in times.items()]
    show(title, ["", "ms", "times as fast"], rows)


if __name__ == "__main__":
    main()
