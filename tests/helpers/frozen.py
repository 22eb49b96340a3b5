"""Reads the table of keys, and takes what is there out of the garbage collector's sight.

The last import of the process that others are forked from: each of them would look through half a million objects of
torch, 0.2 s of CPU at a time, and copy the pages they lie in.
"""

import gc

from torchtitan.grpo.config.keys import TABLES, merged_config, table_keys

merged_config()
for table in TABLES:
    table_keys(table)
gc.collect()
gc.freeze()
gc.enable()
