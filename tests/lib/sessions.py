# SPDX-License-Identifier: Apache-2.0
"""Ends programs and all processes that they have started."""
import os
import signal
import subprocess
from pathlib import Path


def session_of(stat: Path) -> int:
    """The session of the process with this /proc/PID/stat, or 0 if the process is gone."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return 0


def end_session(process: subprocess.Popen, seconds: float = 0) -> None:
    """Kills the session that process leads, so that its children's own process groups (Check's) end, too. First asks the
    process to end, and waits for so many seconds."""
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
