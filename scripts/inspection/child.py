"""A process that compiles for its parent, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def follow(parent: int, folder: str) -> None:
    """From now on this process ends when the process ``parent`` has, however that came about, and the folder goes.

    Args:
      parent: Its id. Ctrl-C is for it alone.
      folder: Where the compiler dumps; "" if it does not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent, folder), daemon=True).start()


def _watch(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    if folder:  # another removes it, for the compiler's own threads write to it until the end
        subprocess.Popen([sys.executable, "-c", _REMOVE, folder], start_new_session=True)
    os._exit(1)  # it would compile on for nobody


_REMOVE = "import shutil, sys, time; time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"
