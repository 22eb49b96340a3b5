"""For all tests."""

import signal

import tests.helpers  # noqa: F401  puts scripts/ on the path

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # their processes inherit it, also where nohup has it ignored
