"""Calls launch wherever it is imported, as a first script may."""

import os

import fxtrain as fx


def one():
    return 1


# The variable keeps this from running when a test tool imports the file.
if os.environ.get("UNGUARDED"):
    fx.launch(one, ranks=1)
