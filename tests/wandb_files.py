"""Reads what Weights & Biases writes without a network."""

import json
import struct
import time

WANDB_OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


def offline_runs(folder):
    """The run record and (step, loss) of each process that wrote into a dump folder, in order."""
    return [offline_run(path) for path in sorted(folder.glob("wandb/offline-run-*"))]


def offline_run(folder):
    """The run record and (step, loss) of one process."""
    [path] = folder.glob("*.wandb")
    records = ended(path)
    return next(r.run for r in records if r.HasField("run")), list(_losses(records))


def ended(path):
    """The records of a file that is complete; W&B may still be writing it when a run has ended."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        records = list(wandb_records(path))
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path}: its run did not end")


def wandb_records(path):
    """The records of a .wandb file: LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little is left of a block for the header of a piece
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # the rest is yet to be written
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history_rows(records):
    """What was logged; the parts of a value that is no number are joined again."""
    for record in records:
        if record.HasField("history"):
            row = {}
            for item in record.history.item:
                name, *rest = item.nested_key
                value = json.loads(item.value_json)
                if rest:
                    row.setdefault(name, {})[".".join(rest)] = value
                else:
                    row[name] = value
            yield row


def _losses(records):
    for row in history_rows(records):
        if "loss" in row:
            yield row["step"], row["loss"]
