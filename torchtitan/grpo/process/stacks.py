"""Where every thread of this process is."""

import sys
import threading
import traceback
from collections import defaultdict


def stacks() -> str:
    """Every thread's stack, under its name. Threads with the same stack come together."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: defaultdict[str, list[str]] = defaultdict(list)
    for ident, frame in sys._current_frames().items():
        threads["".join(traceback.format_stack(frame))].append(names.get(ident, str(ident)))
    return "".join(f"Thread {', '.join(sorted(those))}:\n{stack}" for stack, those in threads.items())
