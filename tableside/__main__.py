"""`python -m tableside`: the command line."""

import sys

from tableside.serving.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
