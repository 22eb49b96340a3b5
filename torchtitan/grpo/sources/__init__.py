"""Where rows come from: everything that `[data] source` may name.

table.py   SOURCES: one row for each source, with the keys that it reads and the function that loads it
rows.py    DatasetRows, what that function returns

The configuration's rules, `--help` and the docs follow from the table.
"""
