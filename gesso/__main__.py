"""`python -m gesso`: the command line without the installed script, for torchrun and debuggers."""

import os
import sys

if sys.path[0] == os.getcwd():  # added by -m; a local random.py would shadow Python's
    del sys.path[0]  # main() appends it

from gesso.cli import main

sys.exit(main())
