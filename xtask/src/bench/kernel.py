# The floor of the interpreter: a bare kernel, and as little as a client of it can be.
#   kernel.py rounds N   prints how many milliseconds each of N trivial cells took
#   kernel.py serve      after an import and a first chart, runs a chart whenever somebody writes to /tmp/in, and
#                        answers on /tmp/out
import json
import os
import subprocess
import sys
import time

import zmq

CHART = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()"
directory = f"/tmp/floor-{os.getpid()}"
os.mkdir(directory)
connection = {"transport": "ipc", "ip": f"{directory}/s", "key": "", "signature_scheme": "hmac-sha256"}
for number, channel in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1):
    connection[channel + "_port"] = number
with open(f"{directory}/c", "w") as file:
    json.dump(connection, file)
kernel = subprocess.Popen([sys.executable, "-m", "ipykernel_launcher", "-f", f"{directory}/c"])
context = zmq.Context()
shell, iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
iopub.subscribe("")
shell.connect(f"ipc://{directory}/s-1")
iopub.connect(f"ipc://{directory}/s-2")
count = 0


def cell(code):
    """True if a picture came."""
    global count
    count += 1
    header = {"msg_id": str(count), "msg_type": "execute_request", "session": "f", "username": "", "version": "5.3", "date": ""}
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
    shell.send_multipart([b"<IDS|MSG>", b"", json.dumps(header).encode(), b"{}", b"{}", json.dumps(content).encode()])
    has_picture = False
    while True:
        parts = iopub.recv_multipart()
        has_picture |= b"image/png" in parts[-1]
        if b'"idle"' in parts[-1] and f'"{count}"'.encode() in parts[4]:
            break
    shell.recv_multipart()
    return has_picture


# Until the kernel is there, and heard.
while True:
    if os.path.exists(f"{directory}/s-2"):
        time.sleep(0.5)
        break
    time.sleep(0.05)
cell("1")
if sys.argv[1] == "rounds":
    for _ in range(int(sys.argv[2])):
        begun = time.perf_counter()
        cell("1 + 1")
        print((time.perf_counter() - begun) * 1000)
    kernel.kill()
else:
    assert cell(CHART)
    os.mkfifo("/tmp/in")
    os.mkfifo("/tmp/out")
    open("/tmp/ready", "w").close()
    while True:
        open("/tmp/in").read()
        assert cell(CHART)
        with open("/tmp/out", "w") as out:
            out.write("done\n")
