"""Takes what is there out of the garbage collector's sight.

The last import of the process that others are forked from: each of them would look through half a million objects of
torch, 0.2 s of CPU at a time, and copy the pages they lie in.
"""

import gc

gc.collect()
gc.freeze()
