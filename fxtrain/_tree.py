"""Walks nested containers: flattens them to leaves and a hashable structure, and back.

torch's own pytree does not know attrs records, unregistered dataclasses or mappings outside the
standard library, and registering them would change the process for all other code. Types that are
registered with `torch.utils._pytree` keep their registered behavior.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree

from fxtrain._words import canonical_text


@attrs.frozen
class TreeSpec:
    """The structure of a tree without its leaves; equal shapes have equal `text`.

    `rebuild` turns the children of this node back into a container of the original type. It may
    hold the original object, so equality ignores it.
    """

    text: str
    children: "tuple[TreeSpec, ...]" = ()
    keys: tuple[Any, ...] = ()
    rebuild: Callable[[list[Any]], Any] | None = attrs.field(default=None, eq=False, repr=False)


_LEAF_SPEC = TreeSpec("*")
# A constant, because a union written at its use is built again for every leaf.
_LEAF_TYPES = (torch.Tensor, int, float, str)
_NONE_SPEC = TreeSpec("None", rebuild=lambda _: None)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Split a tree into its leaves, in a fixed order, and its structure.

    Containers are tuples, lists, dicts and other mappings (walked in key order, so insertion order
    does not matter), NamedTuples, attrs records, dataclasses, None, and every type registered with
    torch's pytree. An attrs or dataclass field whose metadata has `static=True` belongs to the
    structure. Everything else is a leaf, and so is a container for which `is_leaf` is true.
    """
    leaves: list[Any] = []
    return leaves, _walk(tree, leaves, is_leaf)


def unflatten(shape: TreeSpec, leaves: list[Any]) -> Any:
    """Put leaves back into a structure from `flatten`."""
    return _build(shape, iter(leaves))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf and rebuild the tree."""
    if isinstance(tree, _LEAF_TYPES):
        return fn(tree)
    if tree is None:
        return None
    node = _children(tree)
    return fn(tree) if node is None else node[3]([map_leaves(fn, child) for child in node[2]])


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor and rebuild the tree; other leaves stay as they are."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaf_paths(shape: TreeSpec, prefix: str = "") -> list[str]:
    """Name every leaf, such as `['images'][0]`, in the order of `flatten`."""
    if shape is _LEAF_SPEC:
        return [prefix or "the value"]
    return [
        path
        for key, child in zip(shape.keys, shape.children, strict=True)
        for path in leaf_paths(child, f"{prefix}{_key(key)}")
    ]


def row_count(tree: Any) -> int | None:
    """Length of the first dimension of the first tensor that has one; None without any."""
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    return None


def _key(key: Any) -> str:
    return key if isinstance(key, str) and key.startswith(".") else f"[{key!r}]"


def _build(shape: TreeSpec, leaves: Iterator[Any]) -> Any:
    if shape.rebuild is None:
        return next(leaves)
    return shape.rebuild(
        [next(leaves) if child is _LEAF_SPEC else _build(child, leaves) for child in shape.children]
    )


def _walk(tree: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> TreeSpec:
    if isinstance(tree, _LEAF_TYPES):
        leaves.append(tree)
        return _LEAF_SPEC
    if tree is None:
        return _NONE_SPEC
    node = None if is_leaf is not None and is_leaf(tree) else _children(tree)
    if node is None:
        leaves.append(tree)
        return _LEAF_SPEC
    name, keys, children, rebuild = node
    shapes = tuple([_walk(child, leaves, is_leaf) for child in children])
    inner = ", ".join([f"{key}: {shape.text}" for key, shape in zip(keys, shapes, strict=True)])
    return TreeSpec(f"{name}({inner})", shapes, tuple(keys), rebuild)


_Node = tuple[str, Any, list[Any], Callable[[list[Any]], Any]]


def _children(tree: Any) -> _Node | None:
    """Name, keys, children and rebuild function of a container; None for a leaf."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind.__name__, range(len(tree)), list(tree), kind
    if kind is dict:
        return _mapping_children(tree, lambda: {})
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        fields = [f".{field}" for field in kind._fields]
        return kind.__qualname__, fields, list(tree), kind._make
    if attrs.has(kind):
        return _record_children(tree, attrs.fields(kind))
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return _registered_children(tree, registered)
    if dataclasses.is_dataclass(tree):
        return _record_children(tree, dataclasses.fields(tree))
    if isinstance(tree, Mapping):
        return _mapping_children(tree, lambda: copy.copy(tree))
    if isinstance(tree, list):

        def refill(children: list[Any]) -> Any:
            new = copy.copy(tree)
            new[:] = children
            return new

        return kind.__qualname__, range(len(tree)), list(tree), refill
    return None


def _mapping_children(tree: Mapping[Any, Any], fresh: Callable[[], Any]) -> _Node:
    try:
        keys = sorted(tree)
    except TypeError:
        keys = sorted(tree, key=lambda key: (type(key).__qualname__, repr(key)))
    order = list(tree)

    def rebuild(children: list[Any]) -> Any:
        by_key = dict(zip(keys, children, strict=True))
        new = fresh()
        for key in order:
            new[key] = by_key[key]
        return new

    return type(tree).__qualname__, keys, [tree[key] for key in keys], rebuild


def _record_children(tree: Any, fields: Any) -> _Node:
    walked = [field.name for field in fields if not field.metadata.get("static")]

    def rebuild(children: list[Any]) -> Any:
        new = copy.copy(tree)
        for field, child in zip(walked, children, strict=True):
            object.__setattr__(new, field, child)
        return new

    fixed = [f.name for f in fields if f.metadata.get("static")]
    name = type(tree).__qualname__
    if fixed:
        name += (
            f"<{', '.join(f'{field}={canonical_text(getattr(tree, field))}' for field in fixed)}>"
        )
    keys = [f".{field}" for field in walked]
    return name, keys, [getattr(tree, field) for field in walked], rebuild


def _registered_children(tree: Any, node: Any) -> _Node:
    children, context = node.flatten_fn(tree)
    children = list(children)
    name = type(tree).__qualname__
    return name, range(len(children)), children, lambda xs: node.unflatten_fn(xs, context)
