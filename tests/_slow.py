"""Cases of which most run in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow_after"]


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first cases as they are, and the others marked as slow."""
    return [case if k < count else _slow(case) for k, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.slow), id=case.id)
    values: tuple[Any, ...] = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
