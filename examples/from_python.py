"""Train, then draw, from Python: `python from_python.py [key=value ...]`."""

import sys

import gesso

run = gesso.train("demo", "steps=2", *sys.argv[1:])  # folder="…" puts it elsewhere
picture = gesso.load(run.path).sample('a red sign that says "KITE"')[0]
picture.save("kite.png")
print(f"{run.path} and kite.png, {picture.size[0]}×{picture.size[1]}")
