"""Launchers: each is a module or package here, and a line in fxtrain/launchers/table.py."""

__all__: list[str] = []
