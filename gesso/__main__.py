"""`python -m gesso`: the command line without its script, as torchrun and debuggers start it."""

import os
import sys

if sys.path[0] == os.getcwd():  # -m put it there: a random.py in it would break torch
    del sys.path[0]  # main() appends it

from gesso.cli import main

sys.exit(main())
