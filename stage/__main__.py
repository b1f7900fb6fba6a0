"""`python -m stage` is the command `stage`."""

import sys

from stage.cli import main

if __name__ == "__main__":
    sys.exit(main())
