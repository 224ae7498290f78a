"""What tests expect of an error: its code, and what its message names."""

import contextlib
from collections.abc import Iterator

import pytest

import fxtrain as fx


@contextlib.contextmanager
def raises_code(code: str, *named: str) -> Iterator[pytest.ExceptionInfo[fx.FxError]]:
    """Expect an error of fxtrain with this code, whose message contains some values.

    Pass what a test knows: names, numbers, paths and settings. Sentences may change; they
    are tested in tables, such as that of `tests/test_wordings.py`.
    """
    with pytest.raises(fx.FxError) as caught:
        yield caught
    text = str(caught.value)
    assert text.endswith(f"[{code}]"), f"expected {code}, found: {text}"
    missing = [value for value in named if value not in text]
    assert not missing, f"{missing} not in: {text}"
