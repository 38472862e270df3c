# SPDX-License-Identifier: Apache-2.0
"""Ends programs with all that they have started."""
import os
import signal
import subprocess
from pathlib import Path


def session_of(stat: Path) -> int:
    """Of a process that may be gone; 0 then."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return 0


def end_session(process: subprocess.Popen, seconds: float = 0) -> None:
    """process leads a session, so that groups of its children's own (check's) end, too. It has so long to do it itself."""
    if seconds and process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if session_of(stat) == process.pid:
            try:
                os.kill(int(stat.parent.name), signal.SIGKILL)
            except ProcessLookupError:
                pass
    process.wait()
