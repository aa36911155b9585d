"""Train, then sample, from Python: `python from_python.py [key=value ...]`."""

import sys

import gesso

run = gesso.train("demo", "steps=2", *sys.argv[1:])  # folder="…" sets the run folder
image = gesso.load(run.path).sample('a red sign that says "KITE"')[0]
image.save("kite.png")
print(f"{run.path} and kite.png, {image.size[0]}×{image.size[1]}")
