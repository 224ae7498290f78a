"""The secret of a run, by which ranks know which objects of others they may unpickle."""

import hashlib
import hmac
import secrets

from fxtrain.errors import ContextError

# The variable in which every rank gets its secret.
SECRET = "FXTRAIN_RUN_SECRET"
_MIN_BYTES = 16  # characters, so that it cannot be guessed
_TAG_BYTES = 16  # bytes


def fresh_secret() -> str:
    """A random secret, for the ranks of one launch."""
    return secrets.token_hex(32)


def derive_key(secret: str) -> bytes:
    """The key with which ranks sign what they send; empty without a secret.

    Raises:
        ContextError: the secret is too short.
    """
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


def sign(data: bytes | memoryview, key: bytes) -> bytes | memoryview:
    """Prepend a signature that only holders of the key can compute; nothing without a key.

    Example:
        >>> from fxtrain._secret import derive_key, verified, sign
        >>> key = derive_key("16 and more characters")
        >>> bytes(verified(memoryview(sign(b"data", key)), key))
        b'data'
        >>> verified(memoryview(sign(b"data", derive_key("another long secret"))), key) is None
        True
    """
    return b"".join((_digest(key, data), data)) if key else data


def verified(sealed: memoryview, key: bytes) -> memoryview | None:
    """The signed data; None if the signature is not of this key."""
    if not key:
        return sealed
    data = sealed[_TAG_BYTES:]
    return data if hmac.compare_digest(_digest(key, data), sealed[:_TAG_BYTES]) else None


def _digest(key: bytes, data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=_TAG_BYTES, person=b"fxtrain run").digest()
