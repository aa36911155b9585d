"""`gesso plan`: runs the real loop and cluster code over simulated workers with a virtual clock.

`work.py` counts the work of a recipe, `tabulated.py` converts it into seconds on a GPU of
`gpus.toml` (`rates.py`), and `measure.py` measures these rates on this machine. `virtual.py`
contains the simulated workers, `simulate.py` runs the loop, and `planner.py` compares settings."""
