"""What an offline run of W&B wrote."""

import json
import struct
from pathlib import Path

KEY = "0123456789abcdef0123456789abcdef01234567"


def read_offline_records(folder):
    """The protobuf records of the offline run under `folder`: a LevelDB log after a 7-byte header."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service writes the file's end after the run has finished
    (path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
    content, position, message, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        _, length, record_type = struct.unpack_from("<IHB", content, position)
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if record_type in (1, 4):  # a full record, or the last part of one
            record = Record()
            record.ParseFromString(message)
            records.append(record)
            message = b""
    return records


def read_items(updates):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
