"""Reads what W&B writes offline: the package itself has no reader, only `wandb sync`, which needs a server.

A file `run-ID.wandb` is a log as LevelDB writes one: 7 bytes of header, then blocks of 32 KiB with chunks, each with
a checksum (4 bytes), a length (2) and a type (1: whole; 2, 3, 4: first, middle and last part of a record).
"""

import json
import struct
from pathlib import Path

BLOCK = 32 * 1024
HEADER = 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(file: Path):
    """The bytes of each record."""
    data = file.read_bytes()
    assert data.startswith(b":W&B")
    position = HEADER
    parts = []
    while position + HEADER <= len(data):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < HEADER:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            # The rest of a block that was filled up with zeros.
            position += left_in_block
            continue
        begin = position + HEADER
        part = data[begin : begin + length]
        position = begin + length
        if kind in (WHOLE, FIRST):
            parts = []
        parts.append(part)
        if kind in (WHOLE, LAST):
            yield b"".join(parts)


def read(file: Path):
    """The config and the history of an offline run: values by key, and per metric its values by update."""
    from wandb.proto.wandb_internal_pb2 import Record

    config = {}
    history = {}
    for payload in payloads(file):
        record = Record.FromString(payload)
        for update in (*record.run.config.update, *record.config.update):
            config[name_of(update)] = json.loads(update.value_json)
        row = {name_of(item): json.loads(item.value_json) for item in record.history.item}
        for key, value in row.items():
            if not key.startswith("_") and key != "trainer/global_step":
                history.setdefault(key, {})[row["trainer/global_step"]] = value
    return config, history


def name_of(item):
    """The name of an entry, which has a key or the parts of one."""
    return item.key or ".".join(item.nested_key)
