"""`python -m flexdecode` is the command line; knows nothing else."""

from __future__ import annotations

import sys

from flexdecode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
