# A kernel for tests, without any library: it runs Python, and speaks Jupyter's protocol over ZMTP as ipykernel does.
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback

# A test that fails in the middle of a cell leaves nothing that runs on: PR_SET_PDEATHSIG.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

connection = json.load(open(sys.argv[1]))


def listen(channel):
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{connection['ip']}-{connection[channel + '_port']}")
    server.listen()
    return server


def exactly(peer, count):
    data = b""
    while len(data) < count:
        piece = peer.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def greet(peer, kind):
    exactly(peer, 64)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    peer.sendall(bytes([4, len(ready)]) + ready)
    receive_frame(peer)


def receive_frame(peer):
    flags = exactly(peer, 1)[0]
    length = struct.unpack(">Q", exactly(peer, 8))[0] if flags & 2 else exactly(peer, 1)[0]
    return flags, exactly(peer, length)


def receive(peer):
    parts = []
    while True:
        flags, body = receive_frame(peer)
        parts.append(body)
        if not flags & 1:
            return parts


def send(peer, kind, parent, content):
    parts = [b"<IDS|MSG>", b""] + [
        json.dumps(part).encode() for part in ({"msg_type": kind, "msg_id": "k"}, parent, {}, content)
    ]
    data = b""
    for at, part in enumerate(parts):
        data += bytes([2 | (at + 1 < len(parts))]) + struct.pack(">Q", len(part)) + part
    peer.sendall(data)


servers = {channel: listen(channel) for channel in ("iopub", "stdin", "control", "hb")}
shell_server = listen("shell")
shell, _ = shell_server.accept()
greet(shell, b"ROUTER")
iopub, _ = servers["iopub"].accept()
greet(iopub, b"PUB")
receive_frame(iopub)
control, _ = servers["control"].accept()
greet(control, b"ROUTER")
signal.signal(signal.SIGINT, signal.SIG_IGN)
names = {"os": os}
sys.stdout.reconfigure(line_buffering=True)
while True:
    try:
        parts = receive(shell)
    except EOFError:
        sys.exit(0)
    start = parts.index(b"<IDS|MSG>")
    parent, content = json.loads(parts[start + 2]), json.loads(parts[start + 5])
    say = lambda kind, content: send(iopub, kind, parent, content)
    names["show"] = lambda data: say("display_data", {"data": data, "metadata": {}})
    say("status", {"execution_state": "busy"})
    status, payload = "ok", []
    # As ipykernel does on `exit()`: the cell succeeds, and the kernel ends in a moment.
    names["leave"] = lambda: (
        payload.append({"source": "ask_exit", "keepkernel": False}),
        threading.Timer(0.3, os._exit, [0]).start(),
    )
    if parent["msg_type"] == "execute_request":
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = content["code"]
            try:
                value = eval(compile(code, "<cell>", "eval"), names)
            except SyntaxError:
                value = exec(compile(code, "<cell>", "exec"), names)
            if value is not None:
                say("execute_result", {"data": {"text/plain": repr(value)}, "metadata": {}})
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            status = "error"
            lines = traceback.format_exc().splitlines()
            say("error", {"ename": type(error).__name__, "evalue": str(error), "traceback": lines})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
    send(shell, parent["msg_type"].replace("_request", "_reply"), parent, {"status": status, "payload": payload})
    say("status", {"execution_state": "idle"})
