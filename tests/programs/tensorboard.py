"""Reads what TensorBoard reads."""

import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog


def events_of(folder, kind="simple_value"):
    """Points per name as TensorBoard shows them: a restart hides what comes after its step."""
    curves = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == SessionLog.START:
                for points in curves.values():
                    points[:] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                curves.setdefault(value.tag, []).append((event.step, getattr(value, kind)))
    return curves
