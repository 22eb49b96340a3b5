"""What every run has, whatever it trains and whoever started its processes.

running.py             a trainer inside what its process needs around it
nodes.py               what nodes owe one another: the same folder, the same mesh, a sign of life
broadcast.py           from rank 0 to every rank: packed rows, small values, and that the run ends
save_when_stopped.py   signals and errors save the last step
run_folder.py          the dump folder: whether a run may begin in it
watchdog.py            `Progress`: since when nothing was done; `Watchdog`: what every part waits for then
ray/                   `[ray]`: its processes are actors
"""
