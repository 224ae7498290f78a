"""The secret of a run, by which ranks know which objects of others they may unpickle."""

import hashlib
import secrets

from fxtrain.errors import ContextError

# The variable in which every rank gets its secret.
SECRET = "FXTRAIN_RUN_SECRET"
_MIN_BYTES = 16  # characters, so that it cannot be guessed
TAG_BYTES = 16


def fresh_secret() -> str:
    """A random secret, for the ranks of one launch."""
    return secrets.token_hex(32)


def derive_key(secret: str) -> bytes:
    """The key with which ranks sign what they send; empty without a secret."""
    if not secret:
        return b""
    if len(secret) < _MIN_BYTES:
        raise ContextError(
            f"{SECRET} has {len(secret)} characters, but the secret of a run needs at least "
            f"{_MIN_BYTES}. Create one with `openssl rand -hex 32`, the same for every rank.",
            code="FX103",
        )
    return hashlib.sha256(secret.encode()).digest()


def key_proof(key: bytes) -> str:
    """A value by which ranks check that they have the same key, without revealing it."""
    return _digest(key, b"hello").hex() if key else ""


def sign(data: memoryview, key: bytes) -> bytes:
    """`TAG_BYTES` that only holders of the key can compute; zeros without a key.

    Example:
        >>> from fxtrain._secret import derive_key, sign
        >>> one, other = map(derive_key, ("16 and more characters", "another long secret"))
        >>> sign(memoryview(b"data"), one) == sign(memoryview(b"data"), other)
        False
    """
    return _digest(key, data) if key else bytes(TAG_BYTES)


def _digest(key: bytes, data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=TAG_BYTES, person=b"fxtrain run").digest()
