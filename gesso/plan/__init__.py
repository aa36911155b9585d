"""`gesso plan`: the real loop and the real cluster over workers with a virtual clock.

`work.py` counts the work of a recipe, `rates.py` turns it into seconds on a GPU of `gpus.toml`,
`measure.py` measures them on this machine, `virtual.py` has the workers, `simulate.py` runs the
loop, and `planner.py` compares settings."""
