"""`python -m fxtrain.cli`."""

import sys

from fxtrain.cli import main

sys.exit(main())
