"""A run as `fx.track` writes it."""

import json


def written(folder, lines, name="a"):
    folder.mkdir(parents=True, exist_ok=True)
    start = {"step": 0, "time": 100.0, "start": {"id": "1", "name": name, "params": {"lr": 0.1}}}
    text = "".join(json.dumps(one) + "\n" if type(one) is dict else one for one in (start, *lines))
    (folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder
