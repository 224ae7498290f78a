"""The secret of a run: by it ranks know what they may unpickle from what others send."""

import hashlib
import hmac
import secrets

from fxtrain._errors import ContextError

__all__ = ["SECRET", "fresh_secret", "key_of", "open_sealed", "proof", "seal"]

# The variable by which every rank of a run gets its secret.
SECRET = "FXTRAIN_RUN_SECRET"
_FEWEST = 16  # characters, so that it is not guessed
_SEAL = 16  # bytes


def fresh_secret() -> str:
    """A secret that nobody knows, for the ranks of one launch.

    Example:
        >>> from fxtrain._secret import fresh_secret
        >>> len(fresh_secret())
        64
    """
    return secrets.token_hex(32)


def key_of(secret: str) -> bytes:
    """The key by which ranks seal what they send; empty without a secret.

    Raises:
        ContextError: the secret is so short that it could be guessed.
    """
    if not secret:
        return b""
    if len(secret) < _FEWEST:
        raise ContextError(
            f"{SECRET} has {len(secret)} characters, and a secret of a run has at least "
            f"{_FEWEST}. Make one with `openssl rand -hex 32`, the same for every rank."
        )
    return hashlib.sha256(secret.encode()).digest()


def proof(key: bytes) -> str:
    """What ranks show each other to see that they have the same key; it does not tell the key."""
    return _digest(key, b"hello").hex() if key else ""


def seal(data: bytes | memoryview, key: bytes) -> bytes | memoryview:
    """Put before data what only those with the key can compute; nothing without a key.

    Example:
        >>> from fxtrain._secret import key_of, open_sealed, seal
        >>> key = key_of("16 and more characters")
        >>> bytes(open_sealed(memoryview(seal(b"data", key)), key))
        b'data'
        >>> open_sealed(memoryview(seal(b"data", key_of("another long secret"))), key) is None
        True
    """
    return b"".join((_digest(key, data), data)) if key else data


def open_sealed(sealed: memoryview, key: bytes) -> memoryview | None:
    """The data under a seal; None where the seal is not of this key."""
    if not key:
        return sealed
    data = sealed[_SEAL:]
    return data if hmac.compare_digest(_digest(key, data), sealed[:_SEAL]) else None


def _digest(key: bytes, data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=_SEAL, person=b"fxtrain run").digest()
