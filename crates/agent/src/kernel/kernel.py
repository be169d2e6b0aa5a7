# Runs Python's kernel (ipykernel) for `atoll-agent`. Two ways to call it, with the signal by which a kernel is told to
# draw its random numbers anew:
#   kernel.py SIGNAL CONNECTION_FILE READY   becomes a kernel, and says so on the descriptor READY
#   kernel.py SIGNAL                         imports what most sessions need, then forks a kernel for each request on
#                                            standard input, a socket: see `serve`
import os
import signal
import sys

COMMON = ("numpy", "pandas", "matplotlib.pyplot")


def renew_randomness(*_):
    """What a process draws random numbers from was copied with its machine, or with its parent."""
    import random

    random.seed()
    for name in ("numpy.random", "numpy.random.mtrand"):
        module = sys.modules.get(name)
        if module is not None:
            module.seed()
            break
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def import_kernel():
    # The debugger would take memory and threads, and warn of itself in the first cell.
    was_there = "debugpy" in sys.modules
    if not was_there:
        sys.modules["debugpy"] = None
    import ipykernel.ipkernel  # noqa: F401
    import ipykernel.kernelapp  # noqa: F401

    if not was_there:
        del sys.modules["debugpy"]


def run(connection_file, ready):
    import_kernel()
    from ipykernel.kernelapp import IPKernelApp
    from traitlets.config import Config

    renew_randomness()
    signal.signal(RENEW, renew_randomness)
    text = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout = sys.__stdout__ = open(1, "w", **text)
    sys.stderr = sys.__stderr__ = open(2, "w", **text)
    config = Config()
    app = config.IPKernelApp
    app.connection_file = connection_file
    app.log_level = 50
    # What is printed goes to the descriptors 1 and 2, as it does in children, and is read by the agent: in its order
    # and to the last byte.
    app.outstream_class = None
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.display_page = True
    config.HistoryManager.enabled = False
    sys.argv = [""]
    kernel = IPKernelApp.instance(config=config)
    kernel.initialize([])
    shell = kernel.shell
    shell.events.register("post_run_cell", lambda *_: (sys.stdout.flush(), sys.stderr.flush()))
    if "matplotlib_inline.backend_inline" in sys.modules:
        # Imported before there was a shell to draw for.
        sys.modules["matplotlib_inline.backend_inline"]._enable_matplotlib_integration()
    os.write(ready, b"ready")
    os.close(ready)
    kernel.start()


def prepare():
    """Whatever the first chart, table or traceback would have to import or to look for."""
    import gc
    import importlib
    import io

    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    import_kernel()
    for name in COMMON:
        try:
            importlib.import_module(name)
        except Exception:
            pass
    try:
        import pandas

        pandas.DataFrame({"a": [1, 2]})._repr_html_()
        from matplotlib import pyplot

        figure = pyplot.figure()
        figure.add_subplot().plot([1, 2, 3], label="a")
        figure.legend()
        figure.savefig(io.BytesIO(), format="png", bbox_inches="tight")
        pyplot.close("all")
    except Exception:
        pass
    try:
        from IPython.core.ultratb import FormattedTB

        try:
            raise ValueError
        except ValueError:
            FormattedTB(mode="Context", color_scheme="NoColor").text(*sys.exc_info())
    except Exception:
        pass
    gc.collect()
    gc.freeze()


def fork(request, descriptors, ours):
    """The child becomes the kernel and never returns."""
    import traceback

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for handled in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if request["group"]:
            with open(request["group"], "w") as group:
                group.write("0")
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        ready = os.dup(descriptors[3])
        for descriptor in (*descriptors, *ours):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        run(request["connection_file"], ready)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def serve(control):
    """On `control` come sockets, one for each kernel. On such a socket comes one request, with standard streams and a
    pipe; back go the kernel's number and, at its end, how it ended. When the other side closes it, the kernel ends."""
    import array
    import json
    import select
    import socket

    prepare()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control = socket.socket(fileno=control)
    control.setblocking(True)
    kernels = {}
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(control, select.POLLIN)
    asked = {}

    def receive(channel, size, most):
        space = socket.CMSG_SPACE(4 * most)
        data, extra, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) - len(content) % 4])
        return data, list(descriptors)

    while True:
        for number, _ in poll.poll():
            if number == control.fileno():
                data, descriptors = receive(control, 16, 1)
                if not data:
                    os._exit(0)
                for descriptor in descriptors:
                    asked[descriptor] = socket.socket(fileno=descriptor)
                    poll.register(descriptor, select.POLLIN)
            elif number == woken:
                try:
                    os.read(woken, 512)
                except BlockingIOError:
                    pass
                while True:
                    try:
                        pid, status = os.waitpid(-1, os.WNOHANG)
                    except ChildProcessError:
                        break
                    if pid == 0:
                        break
                    for descriptor, kernel in list(kernels.items()):
                        if kernel == pid:
                            try:
                                end = os.waitstatus_to_exitcode(status)
                                asked[descriptor].send(json.dumps({"ended": end}).encode())
                            except OSError:
                                pass
                            kernels[descriptor] = None
            elif number in asked:
                channel = asked[number]
                try:
                    data, descriptors = receive(channel, 1 << 20, 4)
                except OSError:
                    data, descriptors = b"", []
                if data and number not in kernels:
                    ours = [control.fileno(), woken, wake, *asked]
                    pid = fork(json.loads(data), descriptors, ours)
                    kernels[number] = pid
                    for descriptor in descriptors:
                        os.close(descriptor)
                    try:
                        channel.send(json.dumps({"pid": pid}).encode())
                    except OSError:
                        pass
                elif not data:
                    pid = kernels.pop(number, None)
                    if pid:
                        # Not waited for yet, so the number is still its own.
                        os.killpg(pid, signal.SIGKILL)
                    poll.unregister(number)
                    del asked[number]
                    channel.close()


RENEW = int(sys.argv[1])
# This text came in a descriptor. Modules are looked for as in an interactive session.
os.close(int(os.path.basename(sys.argv[0])))
sys.path[0] = ""
if len(sys.argv) > 2:
    run(sys.argv[2], int(sys.argv[3]))
else:
    serve(os.dup(0))
