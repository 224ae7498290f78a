"""What each tracker has written, by its own library or the format of its files."""

import glob
import json
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

__all__ = ["READERS"]


def _tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{folder}/tensorboard", size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    note = events.Tensors("note/text_summary")[0].tensor_proto.string_val[0].decode()
    return {
        "losses": [(e.step, e.value) for e in events.Scalars("loss")],
        "scalars": tags["scalars"],
        "images": tags["images"],
        "hparams": [tag for tag in events.summary_metadata if "hparams" in tag],
        "text": note,
    }


def _records(path, magic):
    """Records of a LevelDB log, which W&B and SwanLab write."""
    raw = Path(path).read_bytes()
    assert raw[:4] == magic
    place, held = 7, b""
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[place : place + 7])
        data = raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind == 0:
            return
        held = data if kind in (1, 2) else held + data
        if kind in (1, 4):
            yield held


def _wandb(folder):
    """W&B's own process may still write the end of a file when `finish` has returned."""
    for _ in range(300):
        found = _wandb_runs(folder)
        if all("exit" in run for run in found):
            break
        time.sleep(0.1)
    return {"runs": found}


def _wandb_runs(folder):
    from wandb.proto import wandb_internal_pb2 as protocol

    runs = []
    for path in sorted(glob.glob(f"{folder}/wandb/offline-run-*/run-*.wandb")):
        found = {"history": [], "config": {}, "path": path}
        for data in _records(path, b":W&B"):
            record = protocol.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                found["history"].append(
                    {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                )
            elif kind == "run":
                found["id"] = record.run.run_id
            elif kind == "exit":
                found["exit"] = record.exit.exit_code
            if kind in ("run", "config"):
                update = record.run.config.update if kind == "run" else record.config.update
                found["config"].update(
                    {c.key or "/".join(c.nested_key): c.value_json for c in update}
                )
        runs.append(found)
    return runs


def _trackio(folder):
    (path,) = glob.glob(f"{folder}/home/**/*.db", recursive=True)
    with sqlite3.connect(path) as base:
        rows = base.execute("select run_name, step, metrics from metrics").fetchall()
    found = [(step, json.loads(text)) for _, step, text in rows]
    return {
        "losses": [(step, one["loss"]) for step, one in found if "loss" in one],
        "tables": sum("rows" in one for _, one in found),
        "names": sorted({name for _, one in found for name in one}),
        "runs": sorted({run for run, _, _ in rows}),
    }


def _comet(folder):
    runs = []
    for path in sorted(
        glob.glob(f"{folder}/comet/**/*.zip", recursive=True), key=lambda p: Path(p).stat().st_mtime
    ):
        with zipfile.ZipFile(path) as file:
            lines = file.read("messages.json").decode().splitlines()
            names = file.namelist()
        messages = [json.loads(line) for line in lines]
        by = {"files": names, "metrics": [], "params": {}, "path": path}
        for message in messages:
            payload = message["payload"]
            if message["type"] == "metric_msg" and payload.get("metric"):
                metric = payload["metric"]
                by["metrics"].append(
                    (
                        metric["metricName"],
                        payload.get("step") or metric.get("step"),
                        metric["metricValue"],
                    )
                )
            elif message["type"] == "parameter_msg":
                param = payload.get("param") or {}
                by["params"][param.get("paramName")] = param.get("paramValue")
        runs.append(by)
    return {"runs": runs}


READ_AIM = """
import json, sys
from aim import Repo
run = Repo(sys.argv[1]).get_run(sys.argv[2])
losses = []
for metric in run.metrics():
    if metric.name == "loss":
        steps, values = metric.values.sparse_list()
        losses = list(zip(steps, values))
print(json.dumps({"hparams": run["hparams"], "losses": losses, "name": run.name,
                  "names": sorted(m.name for m in run.metrics())}))
"""


def _aim(folder):
    state = json.loads(Path(folder, "run.json").read_text())
    run = state["identities"][0]["aim"]
    done = subprocess.run(
        [sys.executable, "-c", READ_AIM, f"{folder}/aim", run],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _mlflow(folder):
    import mlflow

    run = json.loads(Path(folder, "run.json").read_text())["identities"][0]["mlflow"]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{Path(folder).resolve()}/mlflow.db")
    found = client.get_run(run)
    table = json.loads(Path(client.download_artifacts(run, "rows-3.json")).read_text())
    return {
        "losses": [(m.step, m.value) for m in client.get_metric_history(run, "loss")],
        "table": table["data"],
        "params": found.data.params,
        "metrics": sorted(found.data.metrics),
        "artifacts": sorted(a.path for a in client.list_artifacts(run)),
        "status": found.info.status,
    }


def _clearml(folder):
    lines, params = [], []
    for path in glob.glob(f"{folder}/home/**/*.zip", recursive=True):
        with zipfile.ZipFile(path) as file:
            lines += file.read("metrics.jsonl").decode().splitlines()
            params.append(json.loads(file.read("task.json")))
    events = [event for line in lines for event in json.loads(line)]
    return {
        "losses": [
            (e["iter"], e["value"])
            for e in events
            if e["type"] == "training_stats_scalar" and e["metric"] == "loss"
        ],
        "types": sorted({e["type"] for e in events}),
        "hyperparams": params[0]["hyperparams"],
    }


def _dvclive(folder):
    path = Path(folder, "dvclive")
    lines = (path / "plots/metrics/loss.tsv").read_text().splitlines()
    return {
        "losses": [tuple(map(float, line.split("\t"))) for line in lines[1:]],
        "params": (path / "params.yaml").read_text(),
        "files": sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()),
    }


def _swanlab(folder):
    from swanlab.proto.swanlab.record.v1 import record_pb2 as protocol

    runs = []
    for path in sorted(glob.glob(f"{folder}/swanlab/**/*.swanlab", recursive=True)):
        said = []
        for data in _records(path, b":SWL"):
            record = protocol.Record()
            record.ParseFromString(data)
            said.append(str(record))
        runs.append("\n".join(said))
    return {"runs": runs}


READERS = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "comet": _comet,
    "aim": _aim, "mlflow": _mlflow, "clearml": _clearml, "dvclive": _dvclive, "swanlab": _swanlab,
}  # fmt: skip
