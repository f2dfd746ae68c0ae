"""`python -m smoothhess` is the command line."""

import sys

from smoothhess.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
