"""`python -m fxtrain` is `fxtrain`."""

import sys

from fxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
