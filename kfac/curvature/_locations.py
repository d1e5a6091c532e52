"""Which parameters a tapped call has, and whether it is captured.

From what the program says of its arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

from kfac._trees import common_parent
from kfac.curvature._capture import Role, Tap
from kfac.curvature._provenance import Call, Derived, Origin, Program, Source


def located(met: dict[str, Tap], program: Program, paths: list[str]) -> dict[str, Tap]:
    """The taps by name, with what the program says of their parameters."""
    taps: dict[str, Tap] = {}
    for key, tap in met.items():
        calls = program.calls.get(key)
        # `nn.scan` traces its body once to find constants, and throws that trace away.
        tap = _locate(tap, calls, key in program.seen, paths) if calls else tap.without_layer()
        base, count = _name(tap), 1
        name = base
        while name in taps:
            count += 1
            name = f"{base}#{count}"
        taps[name] = tap
    return taps


def _locate(tap: Tap, calls: list[Call], seen: bool, paths: list[str]) -> Tap:
    """A tap with its parameters, or with the reason why it is not captured."""
    call = calls[0]
    params: dict[str, Role] = {}
    reasons = [tap.reason]
    for i, (role, origin) in enumerate(zip(tap.shapes, call.origins, strict=True)):
        if isinstance(origin, Derived):
            how = f"computed inside the loss, by {origin.by}"
            reasons.append(
                f"parameter {role!r} is {how if origin.moves else 'under stop_gradient'}"
            )
        elif origin is None:
            reasons.append(f"parameter {role!r} is not an array of the differentiated tree")
        else:
            mapped = [axes[i] for _, axes in reversed(call.vmaps)]
            stacked, stack_axes, rest = _frames(origin, call.scans, mapped)
            params[role] = Role(paths[origin.input], stacked, stack_axes)
            if rest != sorted(rest):
                reasons.append(f"parameter {role!r} is transposed inside the loss")
    if not seen:
        reasons.append("the loss does not depend on its output, or only under stop_gradient")
    if len(calls) > 1:
        reasons.append(
            f"a function that jax.jit or jax.checkpoint keeps calls it once and is used "
            f"{len(calls)} times; give each use a function of its own"
        )
    if call.scans != tap.scans:
        reasons.append(
            "it stands in a loop that kfac does not see, such as jax.lax.map or fori_loop; use "
            "kfac.scan"
        )
    origins = [origin for call in calls for origin in call.origins]
    return dataclasses.replace(
        tap,
        vmaps=tuple(size for size, _ in reversed(call.vmaps)),
        params=params,
        reason=next(filter(None, reasons), None),
        touched=_paths_of(origins, paths),
        moved=_paths_of([o for o in origins if seen and getattr(o, "moves", True)], paths),
    )


def _frames(
    origin: Source, scans: tuple, mapped: list[int | None]
) -> tuple[tuple[bool, ...], tuple[int, ...], list[int]]:
    """Which frames number layers, along which axes of the parameter, and the parameter's others."""
    along = dict(origin.scans)
    frames = [along.get(depth) for depth in range(len(scans))]
    rest = list(origin.axes)
    for axis in mapped:
        frames.append(None if axis is None else rest.pop(axis))
    chosen = tuple(axis for axis in frames if axis is not None)
    return tuple(axis is not None for axis in frames), chosen, rest


def _paths_of(origins: list[Origin], paths: list[str]) -> frozenset[str]:
    """The parameters that arrays of these origins are made of."""
    bits = [
        1 << origin.input if isinstance(origin, Source) else origin.inputs
        for origin in origins
        if origin is not None
    ]
    whole = functools.reduce(operator.or_, bits, 0)
    return frozenset(path for i, path in enumerate(paths) if whole >> i & 1)


def _name(tap: Tap) -> str:
    """Where its parameters stand, if that is known and the call has no name of its own."""
    base = tap.base or "model"
    if tap.params and not tap.named:
        parent = common_parent([role.path for role in tap.params.values()])
        own = parent in (tap.base, f"params/{tap.base}".rstrip("/"))
        base = base if own else parent or "model"
    return base if tap.captured else f"({base})"
