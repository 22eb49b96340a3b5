"""For all tests."""

import signal

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # their processes inherit it, also where nohup has it ignored
