"""Runs the command of its arguments once no other started by it in this checkout runs. macOS has no flock(1).

The lock is held by the command and by what it starts, also where the make that asked for it was killed.
"""

import fcntl
import os
import sys

lock = os.open("Makefile", os.O_RDWR)
os.set_inheritable(lock, True)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Waiting for another make, which sets up .venv", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - what the Makefile says
