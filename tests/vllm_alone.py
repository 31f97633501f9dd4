"""Code in processes that have imported vLLM and nothing of this package.

Each is forked from one: importing vLLM takes longer than most of them run.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_IMPORTED = "vllm.entrypoints.llm", "vllm.v1.worker.cpu.shm"


def run(code: str, *arguments: object, **env: str) -> str:
    """What code prints that must succeed.

    Args:
        code: As of a script.
        arguments: Of its command line.
        env: More of the environment. What is read when torch or vLLM are imported must
            be in this process's environment.
    """
    program, environment = [code, *map(str, arguments)], os.environ | env
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        job = program, dict(environment), list(map(str, outputs))
        server = _server()
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        printed, errors = (output.read_text() for output in outputs)
    assert status == "0\n", errors[-3000:]
    return printed


@functools.cache
def _server() -> subprocess.Popen:
    """It ends with this process, whose end its input has."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], text=True, **pipes)


def _serve() -> None:
    # Of this script's folder; a name in there must not hide a package's.
    del sys.path[0]
    for name in _IMPORTED:
        __import__(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _become(*job)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def _become(
    program: list[str], environment: dict[str, str], outputs: list[str]
) -> None:
    code, *arguments = program
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), number)
    failed = True
    try:
        exec(code, {"__name__": "__main__"})
        failed = False
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)


if __name__ == "__main__":
    _serve()
