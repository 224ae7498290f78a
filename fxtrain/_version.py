"""The version of fxtrain."""

__version__ = "0.1.0"
