"""Switches garbage collection off, until `frozen` has been imported: a tenth of the time that imports take."""

import gc

gc.disable()
