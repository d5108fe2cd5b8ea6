"""Runs vLLM and leaves the errors that it ended with in the termination log.

Goes into the pod as text (``python3 -c``): the standard library alone. vLLM writes no termination
message, and the end of its log is the API server's, which says no more than "see root cause above":
the engine's own error stands far before the 2 KiB that a kubelet keeps.
"""

import collections
import re
import signal
import subprocess
import sys
import threading

# How Python and argparse name an error, whatever stands before it in the line.
ERROR = re.compile(
    rb"(?<![`\w.])[\w.]+(?:Error|Exception)(?:: .*)?\s*$"
    rb"|(?:Value error, |vllm[\w ]*: error: |NVRM: Xid|NCCL).*"
)
MOST, LINE = 12, 300


def main(command: list[str], log: str = "/dev/termination-log") -> int:
    """The exit status of ``command``; 128 and the number of the signal that ended it."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: child.send_signal(caught))
    # Each once: when an engine dies every request that it had says so.
    errors: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def copy() -> None:
        for line in child.stdout or ():
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if (found := ERROR.search(line)) is not None:
                errors[found[0][:LINE].rstrip()] = None
                if len(errors) > MOST:
                    errors.popitem(last=False)

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    status = child.wait()
    # A worker that has outlived vLLM holds the pipe open; it ends with this container.
    copying.join(2)
    if status and errors:
        with open(log, "wb") as file:
            file.write(b"\n".join(errors)[-4096:])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
