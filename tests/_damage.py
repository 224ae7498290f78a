"""Damage to files: bytes that change, and values of a wrong kind in the middle of others."""

import contextlib
import copy
import io
import zipfile

import torch
from hypothesis import strategies as st
from torch import nn

_TEXT = ["", "\0", "9" * 30, "-1", "1e999", "NaN", "null", "[", "{", '"', "\n", ": ", "- ", "\t"]
_TEXT += ["*a", "&a ", "<<", "!!int ", "!!set ", "0x" + "f" * 5000]
_TEXT += ["\x1b[31m", "\x9b", "\u202e", "\\ud800"]
# Opcodes of pickles, each with what follows it.
_OPCODES = [b".", b"}", b"]", b"(", b"t", b"R", b"b", b"q\xff", b"r\xff\xff\xff\x7f", b"j\0\0\0\0"]
_OPCODES += [b"J\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x8a\xff", b"\x95"]
_OPCODES += [b"\x96" + b"\x7f" * 8]
_PIECES = [*(text.encode() for text in _TEXT), *_OPCODES, b"\xff" * 8]
_WRONG = [None, True, -1, 0, 3, 2**31, 2**62, 10**40, 0.5, float("nan"), float("inf"), "", "x", 1j]
_WRONG += ["../x", "\x1b[31m", "a\0b", [], {}, (), [[]], {"a": 1}, (1, 2), [None], {0: {}}, b"x"]


@st.composite
def damaged(draw, raw):
    """Bytes with up to three changes: set, turned, cut off, left out, repeated or put in."""
    made = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(made) - 1, 0)))
        how = draw(st.sampled_from(["set", "turn", "end", "drop", "again", "put", "put"]))
        if how == "set" and made:
            made[place] = draw(st.integers(0, 255))
        elif how == "turn" and made:
            made[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "end":
            del made[place:]
        elif how == "drop":
            del made[place : place + draw(st.integers(1, 20))]
        elif how == "again":
            made[place:place] = made[place : place + draw(st.integers(1, 200))]
        else:
            made[place:place] = draw(st.sampled_from(_PIECES))
    return bytes(made)


@st.composite
def damaged_inside(draw, raw):
    """An archive of torch.save whose pickle was damaged, and which is whole apart from that."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            inner = old.read(name)
            new.writestr(name, draw(damaged(inner)) if name.endswith("/data.pkl") else inner)
    return out.getvalue()


@st.composite
def damaged_save(draw, raw, contents):
    """A file of torch.save with damaged bytes, a damaged pickle, or values of a wrong kind."""
    how = draw(st.sampled_from(["bytes", "pickle", "values"]))
    if how != "values":
        return draw((damaged if how == "bytes" else damaged_inside)(raw))
    out = io.BytesIO()
    torch.save(draw(misshapen(contents)), out)
    return out.getvalue()


@contextlib.contextmanager
def replaced(path, change):
    """A file with other bytes, a function of its own, during the block."""
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    try:
        yield
    finally:
        path.write_bytes(whole)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def places(data, path=()):
    """The path of everything in plain data, the whole first."""
    yield path
    if isinstance(data, dict | list | tuple):
        for key, one in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(one, (*path, key))


@st.composite
def misshapen(draw, data):
    """Plain data in which one or two values are of another kind, are absent, or are another's."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(data))))
        other = draw(st.one_of(st.sampled_from(_WRONG), st.sampled_from(list(places(data)))))
        value = _at(data, other) if isinstance(other, tuple) and other in places(data) else other
        data = _put(data, path, copy.deepcopy(value), drop=draw(st.booleans()))
    return data


def _at(data, path):
    for key in path:
        data = data[key]
    return data


def _put(data, path, value, *, drop):
    if not path:
        return value
    key, *rest = path
    if drop and not rest and isinstance(data, dict):
        return {name: one for name, one in data.items() if name != key}
    if isinstance(data, dict):
        return {**data, key: _put(data[key], rest, value, drop=drop)}
    made = [*data[:key], _put(data[key], rest, value, drop=drop), *data[key + 1 :]]
    return made if isinstance(data, list) else tuple(made)


def only(errors, call, *args, longest=6_000):
    """Call; what is raised is one of these errors, short, and safe to print. Whether none was."""
    try:
        call(*args)
    except errors as error:
        text = str(error)
        assert text and len(text) < longest
        assert all(one.isprintable() or one in "\n\t" for one in text)
        return False
    return True
