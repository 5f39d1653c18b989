"""Putting transformations together."""

from __future__ import annotations

from typing import Any

from functional_optim import base
from functional_optim.leafwise import Leafwise


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
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


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


def extra_names(tx: base.GradientTransformation) -> tuple[str, ...]:
    """The extra arguments that a transformation's update takes."""
    if isinstance(tx, Leafwise):
        return tuple([name for link in tx.links for name in link.extra])
    if isinstance(tx, Sequence):
        return tuple([name for part in tx.parts for name in extra_names(part)])
    return base.extra_names(tx.update)


def required_names(tx: base.GradientTransformation) -> tuple[str, ...]:
    """The extra arguments without which a transformation's update cannot do."""
    if isinstance(tx, Sequence):
        return tuple([name for part in tx.parts for name in required_names(part)])
    if isinstance(tx, Leafwise):
        asking = [link for link in tx.links if link.extra]
        known = [getattr(link.scalars, "__kwdefaults__", None) or {} for link in asking]
        pairs = zip(asking, known, strict=True)
        return tuple([name for link, own in pairs for name in link.extra if name not in own])
    known = getattr(tx.update, "__kwdefaults__", None) or {}
    return tuple([name for name in base.extra_names(tx.update) if name not in known])


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
