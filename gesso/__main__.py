"""`python -m gesso`: the command line without its script, as torchrun and debuggers start it."""

import os
import sys

if sys.path[0] == os.getcwd():  # before anything else is imported: a random.py there breaks torch
    del sys.path[0]  # main() appends it

from gesso.cli import main

sys.exit(main())
