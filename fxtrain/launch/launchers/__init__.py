"""Launchers: each is a module or package here, and a line in fxtrain/launch/table.py."""

__all__: list[str] = []
