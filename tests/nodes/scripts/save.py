"""Save, restore, export and track in the folder of the first argument; print errors."""

import sys

import torch

import fxtrain as fx

with fx.detect(device="cpu", timeout_s=20) as ctx:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.AdamW(params))
    for action in sys.argv[2:]:
        try:
            if action == "save":
                fx.save(sys.argv[1], ctx, model, position=fx.Position(updates=1))
            elif action == "export":
                fx.export(model, sys.argv[1])
            elif action == "export sharded":
                fx.export(model, sys.argv[1], "20KB", sharded=True)
            elif action.startswith("track"):
                who = "all" if action == "track all" else "main"
                start = fx.Position(updates=1)
                with fx.track(sys.argv[1], ctx, resume="folder", position=start, ranks=who) as run:
                    run.log({"loss": 0.5}, fx.Position(updates=2))
            elif action == "latest":
                print("latest is", fx.latest(sys.argv[1]), flush=True)
            else:
                fx.restore(sys.argv[1], ctx, model)
            print(f"{action} done", flush=True)
        except fx.FxError as error:
            print(f"{action}: {error}", flush=True)
