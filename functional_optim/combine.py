"""Putting transformations together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from functional_optim import base, tree
from functional_optim.leafwise import Leafwise, frozen
from functional_optim.paths import chosen
from functional_optim.rules import Link


def chain(*transforms: base.GradientTransformation) -> base.GradientTransformation:
    """Apply transformations one after the other.

    Chains inside chains are flattened. Neighbours that are made of one-tensor rules are fused: they
    share one step count and become one kernel. A chain of nothing else has a `State`; otherwise the
    state is a tuple with one entry per fused part or other transformation.

    Args:
        transforms: transformations, applied from first to last. None at all is the identity.

    Returns:
        A transformation. Its `update` takes the extra arguments that any part declares, and gives
        each part its own; anything else raises.

    Raises:
        TypeError: if an argument is not a `GradientTransformation`.
        ValueError: if two parts have slots of the same name and no names of their own, or a part
            that reads the updated parameters is not the last.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adam(lr=1e-2))
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.tensor([3.0, -4.0])}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.0100,  0.0100])}
    """
    parts: list[base.GradientTransformation] = []
    run: list[Leafwise] = []
    for part in [part for tx in transforms for part in _parts(tx)]:
        if isinstance(part, Leafwise):
            run.append(part)
        else:
            parts += [*_joined(run), part]
            run = []
    parts += _joined(run)
    if not parts:
        return Leafwise(())
    if len(parts) == 1:
        return parts[0]
    freezing = frozen_links(*parts)
    return Sequence(tuple([_without(freezing, part) for part in parts] if freezing else parts))


def _joined(run: list[Leafwise]) -> list[base.GradientTransformation]:
    """Neighbours as one, without those that do nothing."""
    some = [part for part in run if part.links]
    if len(some) < 2:
        return [*some]
    return [Leafwise(tuple([link for part in some for link in part.links]))]


def named_chain(*named: tuple[str, base.GradientTransformation]) -> base.GradientTransformation:
    """`chain`, with a name for each part: it tells slots of the same name apart.

    Args:
        named: pairs of a name and a transformation. The names must differ.

    Returns:
        A transformation. Where two parts have a slot of one name, say `momentum_buffer`, the state
        keeps them as `fast.momentum_buffer` and `slow.momentum_buffer`.

    Raises:
        ValueError: if two parts have the same name.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9)))
        >>> sorted(tx.init(torch.ones(2)).slots)
        ['fast.momentum_buffer', 'slow.momentum_buffer']
    """
    names = [name for name, _ in named]
    if len(set(names)) != len(names):
        raise ValueError(f"named_chain needs different names, but got {names}.")
    return chain(*[_rename(name, tx) for name, tx in named])


class Sequence(base.GradientTransformation):
    """A chain whose parts cannot all be fused. parts: what it runs, in order."""

    parts: tuple[base.GradientTransformation, ...]

    def __new__(cls, parts: tuple[base.GradientTransformation, ...]) -> Sequence:
        for part in parts[:-1]:
            if isinstance(part, Leafwise) and part.links[-1].tail:
                raise ValueError(
                    f"a transformation stands after {part.links[-1].name}, which reads the "
                    f"parameters after the update; put {part.links[-1].name} last in the chain."
                )
        known = [extra_names(part) for part in parts]
        every = tuple([name for names in known for name in names])

        def init(params: Any) -> tuple[Any, ...]:
            return tuple([part.init(params) for part in parts])

        def update(
            grads: Any, state: tuple[Any, ...], params: Any = None, **extra: Any
        ) -> tuple[Any, tuple[Any, ...]]:
            base.check_extra(extra, every)
            if len(state) != len(parts):
                raise ValueError(
                    f"chain of {len(parts)} parts got a state of length {len(state)}; pass the "
                    "state that this chain's own init returned."
                )
            new = []
            for part, mine, names in zip(parts, state, known, strict=True):
                chosen = {name: extra[name] for name in names if name in extra}
                grads, mine = part.update(grads, mine, params, **chosen)
                new.append(mine)
            return grads, tuple(new)

        self = super().__new__(cls, init, update)
        self.parts = parts
        return self


class Wrapped(base.GradientTransformation):
    """A transformation of whole trees, around another one whose extra arguments it passes on.

    inner: that one. spared: where the leaves are frozen that it does not see.
    """

    inner: base.GradientTransformation
    spared: tuple[Any, ...]

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        inner: base.GradientTransformation,
        spared: tuple[Any, ...] = (),
    ) -> Self:
        self = super().__new__(cls, init, update)
        self.inner = inner
        self.spared = spared
        return self


class WithoutGradients(base.GradientTransformation):
    """A transformation of whole trees that reads no gradients: they may all be `None`."""


def reads_gradients(tx: base.GradientTransformation) -> bool:
    """Is there nothing to do for a transformation as long as there are no gradients?"""
    if isinstance(tx, Sequence):
        return all(reads_gradients(part) for part in tx.parts)
    if isinstance(tx, Wrapped):
        return reads_gradients(tx.inner)
    return not isinstance(tx, WithoutGradients)


def meets(tx: base.GradientTransformation) -> bool:
    """Does a transformation take part in sums over processes, whatever gradients there are here?"""
    if isinstance(tx, Sequence):
        return any(meets(part) for part in tx.parts)
    if isinstance(tx, Wrapped):
        return meets(tx.inner)
    return isinstance(tx, Leafwise) and tx.meets


def on_some(
    acts: Callable[[str, Tensor], bool],
    tx: base.GradientTransformation,
    spared: tuple[Any, ...] = (),
) -> base.GradientTransformation:
    """A transformation of whole trees, of some leaves: it sees a tree with gaps.

    acts: is a leaf, given by its path and itself, one of them?
    """

    def cut(params: Any, *trees: Any) -> list[Any]:
        def kept(path: str, p: Tensor, x: Any) -> Any:
            return x if acts(path, p) else None

        return [tree.map_with_path(kept, params, x) for x in (params, *trees)]

    def init(params: Any) -> Any:
        (mine,) = cut(params)
        return tx.init(mine) if tree.leaves(mine) else base.EmptyState()

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        base.check_extra(extra, known)
        if params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params).")

        def joined(path: str, p: Tensor, g: Any, u: Any) -> Any:
            return u if acts(path, p) else g

        mine, given = cut(params, grads)
        if not tree.leaves(mine):
            return grads, state
        updates, state = tx.update(given, state, mine, **extra)
        return tree.map_with_path(joined, params, grads, updates), state

    known = extra_names(tx)
    return Wrapped(init, update, tx, spared)


def frozen_links(*parts: base.GradientTransformation) -> tuple[Link, ...]:
    """The links of a chain's parts that take leaves out of all of it."""
    every = [x for part in parts for x in (part.parts if isinstance(part, Sequence) else (part,))]
    links = [link for part in every if isinstance(part, Leafwise) for link in part.links]
    return tuple([link._replace(gate=0) for link in links if link.update is frozen])


def _without(
    freezing: tuple[Link, ...], part: base.GradientTransformation
) -> base.GradientTransformation:
    """A part of a chain in which some leaves are frozen, without these."""
    if isinstance(part, Leafwise):
        known = [link.where for link in part.links if link.update is frozen]
        missing = [link for link in freezing if link.where not in known]
        return Leafwise((*missing, *part.links)) if missing else part
    places = tuple([link.where for link in freezing])
    if isinstance(part, Wrapped) and part.spared == places:
        return part

    def acts(path: str, p: Tensor) -> bool:
        return not any(chosen(where, path, p) for where in places)

    return on_some(acts, part, places)


def extra_names(tx: base.GradientTransformation) -> tuple[str, ...]:
    """The extra arguments that a transformation's update takes."""
    if isinstance(tx, Leafwise):
        return tuple([name for link in tx.links for name in link.extra])
    if isinstance(tx, Sequence):
        return tuple([name for part in tx.parts for name in extra_names(part)])
    inner = extra_names(tx.inner) if isinstance(tx, Wrapped) else ()
    return (*base.extra_names(tx.update), *inner)


def required_names(tx: base.GradientTransformation) -> tuple[str, ...]:
    """The extra arguments without which a transformation's update cannot do."""
    if isinstance(tx, Sequence):
        return tuple([name for part in tx.parts for name in required_names(part)])
    if isinstance(tx, Leafwise):
        asking = [link for link in tx.links if link.extra]
        known = [getattr(link.scalars, "__kwdefaults__", None) or {} for link in asking]
        pairs = zip(asking, known, strict=True)
        return tuple([name for link, own in pairs for name in link.extra if name not in own])
    inner = required_names(tx.inner) if isinstance(tx, Wrapped) else ()
    known = getattr(tx.update, "__kwdefaults__", None) or {}
    own = [name for name in base.extra_names(tx.update) if name not in known]
    return (*own, *inner)


def _parts(tx: base.GradientTransformation) -> tuple[base.GradientTransformation, ...]:
    if not isinstance(tx, base.GradientTransformation):
        raise TypeError(
            f"chain takes transformations, but got a {type(tx).__name__}; call the factory, e.g. "
            "chain(clip_by_global_norm(1.0), adam())."
        )
    return tx.parts if isinstance(tx, Sequence) else (tx,)


def _rename(name: str, tx: base.GradientTransformation) -> base.GradientTransformation:
    if isinstance(tx, Leafwise):
        if len(tx.links) == 1:
            return Leafwise((tx.links[0]._replace(name=name),))
        return Leafwise(tuple([_prefix(name, link) for link in tx.links]))
    if isinstance(tx, Sequence):
        return Sequence(tuple([_rename(name, part) for part in tx.parts]))
    return tx


def _prefix(name: str, link: Any) -> Any:
    return link._replace(name=f"{name}.{link.name}" if link.name else name)
