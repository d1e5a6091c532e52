"""Blocks: a layer's parameters, its captured pairs (a, g), and the products F v of its curvature.

Every layer is seen through its local Jacobian J_n (input of example n, one row per token t) and its
cotangents g_n. Of a dense layer ``exact_product`` is Aᵀ diag(A V Gᵀ) G / N, and ``kron_product``,
in which tokens count as examples, (AᵀA/NT) V (GᵀG/N), K-FAC's (Martens & Grosse, 2015).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kfac.curvature._capture import Param, Tap
from kfac.curvature._layers import framed

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Lane = tuple[Array, ...]  # one array per parameter of a block, or per use, of one lane
    Program = tuple["Use", ...]

# Rows of the largest factor that is formed: what is wider has the diagonal of its right one.
MOST_ROWS = 8192
# At most so many examples' own gradients are held together where only their squares are summed.
EXAMPLES_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Use:
    """One call of a layer, for one lane."""

    name: str  # of the tap
    layer: Any  # its kind, a ``Dense`` or a ``Generic``
    roles: tuple[tuple[str, int], ...]  # (role in the layer, index among the block's parameters)
    frames: tuple[tuple[int, bool], ...]  # leading axes that are captured: size, whether of lanes
    output: jax.ShapeDtypeStruct  # y, with the frames that are not lanes
    input_dtypes: tuple[Any, ...]  # of the leaves of x
    example_axis: int  # of ``output``; it may number each example's tokens too
    num_examples: int  # N

    @property
    def num_tokens(self) -> int:
        """T: rows of the layer's output per example."""
        return math.prod(self.output.shape[:-1]) // self.num_examples

    @property
    def num_outputs(self) -> int:
        return self.output.shape[-1]

    @property
    def captured_example_axis(self) -> int:
        """The example axis of captured arrays, where frames that number lanes are in place."""
        inner = [i for i, (_, is_lane) in enumerate(self.frames) if not is_lane]
        if self.example_axis < len(inner):
            return inner[self.example_axis]
        return self.example_axis + len(self.frames) - len(inner)

    def with_examples(self, count: int) -> Use:
        old, shape, frames = self.num_examples, [*self.output.shape], [*self.frames]
        axis, inner = self.example_axis, self.captured_example_axis
        shape[axis] = shape[axis] // old * count
        if inner < len(frames):
            frames[inner] = (frames[inner][0] // old * count, frames[inner][1])
        output = jax.ShapeDtypeStruct(tuple(shape), self.output.dtype)
        return dataclasses.replace(self, output=output, frames=tuple(frames), num_examples=count)

    def own(self, params: Lane) -> dict[str, Array]:
        return {role: params[i] for role, i in self.roles}

    def lanes_first(self, array: Array, num_column_axes: int = 0) -> Array:
        """A captured array with the frames that number lanes as one leading axis."""
        lanes = [i for i, (_, is_lane) in enumerate(self.frames, num_column_axes) if is_lane]
        array = jnp.moveaxis(array, lanes, range(len(lanes)))
        return array.reshape(-1, *array.shape[len(lanes) :])

    def inputs(self, x: Any) -> Any:
        leaves, treedef = jax.tree.flatten(x)
        pairs = zip(leaves, self.input_dtypes, strict=True)
        return jax.tree.unflatten(treedef, [self.lanes_first(a).astype(d) for a, d in pairs])

    def cotangents(self, g: Array) -> Float[Array, "lane column example token out"]:
        return jax.vmap(jax.vmap(self.rows))(self.lanes_first(g, num_column_axes=1))

    def rows(self, array: Array) -> Float[Array, "example token out"]:
        array = jnp.moveaxis(array, self.example_axis, 0)
        return array.reshape(self.num_examples, -1, array.shape[-1])

    def split_examples(self, x: Any) -> Any:
        """Inputs of one lane by example, first; None where they do not number them as y does."""
        axis, size = self.example_axis, self.output.shape[self.example_axis]
        if any([a.shape[axis : axis + 1] != (size,) for a in jax.tree.leaves(x)]):
            return None

        def split(a: Array) -> Array:
            a = a.reshape(*a.shape[:axis], self.num_examples, -1, *a.shape[axis + 1 :])
            return jnp.moveaxis(a, axis, 0)

        return jax.tree.map(split, x)

    def jvp(self, linearized: Any, v: Lane) -> Float[Array, "example token out"]:
        """J v, in float32 or better."""
        y = self.layer.jvp(linearized, self.own(v), self.output)
        return self.rows(y.astype(accumulator(y)))

    def vjp(self, linearized: Any, z: Float[Array, "example token out"]) -> dict[str, Array]:
        """Jᵀ z by role."""
        shape = list(self.output.shape)
        moved = [shape.pop(self.example_axis), *shape]
        z = jnp.moveaxis(z.reshape(moved), 0, self.example_axis)
        return self.layer.vjp(linearized, z if self.layer.factored else z.astype(self.output.dtype))


@dataclasses.dataclass(frozen=True)
class Block:
    """The parameters of a layer, and every call that uses them (several for tied weights)."""

    name: str  # for tables, telemetry and optimizer state
    params: tuple[Param, ...]
    uses: tuple[Use, ...]
    lanes: int  # how many layers of this shape are stacked (1 unless scanned or vmapped)

    def with_examples(self, count: int) -> Block:
        uses = tuple([use.with_examples(count) for use in self.uses])
        return dataclasses.replace(self, uses=uses)

    @property
    def size(self) -> int:
        return sum([math.prod(p.shape) for p in self.params])

    @functools.cached_property
    def program(self) -> tuple[Use, ...]:
        """All that products depend on besides arrays: blocks of equal ones are solved together."""
        return tuple([dataclasses.replace(use, name="", frames=()) for use in self.uses])

    @functools.cached_property
    def factored(self) -> bool:
        """Whether two Kronecker factors describe it: all uses are one dense layer's."""
        layers = {(use.layer, use.roles) for use in self.uses}
        return len(layers) == 1 and self.uses[0].layer.factored

    @functools.cached_property
    def lifted_shape(self) -> tuple[int, int]:
        """(inputs, outputs) of the matrix that a factored block multiplies features by."""
        use = self.uses[0]
        shapes: Any = tuple([jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in self.params])
        own = use.own(shapes)
        return jax.eval_shape(use.layer.lift, own, own).shape


def find_blocks(taps: dict[str, Tap], num_examples: int) -> tuple[dict[str, Block], dict[str, str]]:
    """Tapped calls as blocks that share no parameter, and why others can have none, by name."""
    refused = {name: _reason_against(tap, num_examples) for name, tap in taps.items()}
    skipped = {name: reason for name, reason in refused.items() if reason is not None}
    # What moves the loss by a way that is not captured has more curvature than the others show.
    partly = {path: reason for n, reason in skipped.items() for path in sorted(taps[n].moved)}
    groups: list[tuple[set[str], list[str]]] = []
    for name, tap in taps.items():
        if not tap.captured or name in skipped:
            continue
        paths, names = {param.path for param in tap.params.values()}, [name]
        for group in [g for g in groups if g[0] & paths]:
            groups.remove(group)
            paths, names = paths | group[0], group[1] + names
        groups.append((paths, names))
    blocks = {}
    for paths, names in groups:
        block = next(iter([partly[path] for path in sorted(paths & partly.keys())]), None)
        block = block or _make_block({name: taps[name] for name in names}, num_examples)
        if isinstance(block, str):
            skipped |= dict.fromkeys(names, block)
        else:
            blocks[block.name] = block
    return blocks, skipped


def _reason_against(tap: Tap, num_examples: int) -> str | None:
    if not tap.captured:
        return tap.reason
    if _example_axis(tap, num_examples) is None:
        return f"no axis of its output {tap.y.shape} numbers the {num_examples} examples"
    return None


def _frames(tap: Tap) -> tuple[tuple[int, bool], ...]:
    """Size of each frame, and whether it numbers lanes."""
    return tuple(zip(tap.frames, tap.stacked, strict=True))


def _example_axis(tap: Tap, num_examples: int) -> int | None:
    """Where the program says it.

    Else by a vmap, by the output's first axis (which may hold tokens too), or by a scan.
    """
    frames = enumerate(_frames(tap))
    if tap.examples is not None:
        axis = len(tap.scans) + tap.examples
        return axis - sum(tap.stacked[:axis])
    inner = [(size, i >= len(tap.scans)) for i, (size, is_lane) in frames if not is_lane]
    vmaps = [i for i, (size, is_vmap) in enumerate(inner) if is_vmap and size == num_examples]
    scans = [i for i, (size, is_vmap) in enumerate(inner) if not is_vmap and size == num_examples]
    first = [len(inner)] if len(tap.y.shape) > 1 and tap.y.shape[0] % num_examples == 0 else []
    return next(iter(vmaps + first + scans), None)


def _make_block(taps: dict[str, Tap], num_examples: int) -> Block | str:
    params: dict[str, Param] = {}
    for param in [param for tap in taps.values() for param in tap.params.values()]:
        if params.setdefault(param.path, param) != param:
            return f"{param.path} is stacked in one use and not in another"
    order, lanes, uses = list(params), set(), []
    for name, tap in taps.items():
        frames = _frames(tap)
        lanes.add(math.prod([size for size, is_lane in frames if is_lane]))
        inner = [size for size, is_lane in frames if not is_lane]
        axis = _example_axis(tap, num_examples)
        assert axis is not None, "such a tap has no block"
        use = Use(
            name=name,
            layer=framed(tap.layer, len(inner)),
            roles=tuple([(role, order.index(p.path)) for role, p in tap.params.items()]),
            frames=frames,
            output=jax.ShapeDtypeStruct((*inner, *tap.y.shape), tap.y.dtype),
            input_dtypes=tuple([leaf.dtype for leaf in jax.tree.leaves(tap.x)]),
            example_axis=axis,
            num_examples=num_examples,
        )
        uses.append(use)
    if len(lanes) > 1:
        return "its uses are stacked differently"
    return Block(next(iter(taps)), tuple(params.values()), tuple(uses), lanes.pop())


# ---- Products of one lane. `program` is Block.program; `g` holds each use's cotangents
# (column, example, token, out).


def linearize(program: Program, params: Lane, inputs: tuple) -> tuple:
    pairs = zip(program, inputs, strict=True)
    return tuple([use.layer.linearize(use.own(params), x) for use, x in pairs])


def pushforward(program: Program, linearized: tuple, v: Lane) -> Lane:
    """J v of each use, (N, T, outputs)."""
    return tuple([use.jvp(state, v) for use, state in zip(program, linearized, strict=True)])


def pullback(program: Program, linearized: tuple, zs: Sequence[Array], like: Lane) -> Lane:
    """Σ_uses Jᵀ z."""
    total = [jnp.zeros_like(p) for p in like]
    for use, state, z in zip(program, linearized, zs, strict=True):
        pulled = use.vjp(state, z)
        for role, i in use.roles:
            total[i] += pulled[role].astype(total[i].dtype)
    return tuple(total)


def example_derivatives(g: Lane, pushed: Lane) -> Float[Array, "column example"]:
    """θ_n = ⟨g_n, J_n v⟩: each example's derivative of its loss along v."""
    pairs = zip(g, pushed, strict=True)
    # No product of matrices: XLA would transpose copies of both operands for it on a CPU.
    return functools.reduce(jnp.add, [(gs * ys).sum((-2, -1)) for gs, ys in pairs])


def exact_product(program: Program, linearized: tuple, g: Lane, v: Lane) -> Lane:
    """F v = (1/N) Σ_n Jᵀ(θ_n g_n)."""
    theta = example_derivatives(g, pushforward(program, linearized, v)) / program[0].num_examples
    return pullback(program, linearized, [jnp.einsum("cn,cnto->nto", theta, gs) for gs in g], v)


def kron_product(
    program: Program,
    linearized: tuple,
    right: Lane,
    v: Lane,
    weights: Float[Array, " example"] | None = None,
) -> Lane:
    """K v = (1/NT) Σ Jᵀ 𝒢 J v, with 𝒢 as of ``right_factors`` and weights of mean 1."""
    groups = output_groups(program)
    zs = []
    for use, y in zip(program, pushforward(program, linearized, v), strict=True):
        matrix, tokens = right[list(groups).index(use.num_outputs)], groups[use.num_outputs]
        y = y * matrix if matrix.ndim == 1 else y @ matrix
        y = y if weights is None else y * weights[:, None, None]
        zs.append(y / (use.num_examples * tokens))
    return pullback(program, linearized, zs, v)


def output_groups(program: Program) -> dict[int, int]:
    """Number of outputs → tokens per example of all uses with that many, in order of first use."""
    groups: dict[int, int] = {}
    for use in program:
        groups[use.num_outputs] = groups.get(use.num_outputs, 0) + use.num_tokens
    return groups


def right_factors(program: Program, g: Lane, narrow: str | None = None) -> Lane:
    """𝒢 = Σ g gᵀ / N over the uses with equally many outputs, in order of first use.

    Its diagonal where it has more than ``MOST_ROWS`` rows. Of g rounded to ``narrow``, if given.
    """
    factors = []
    for outputs in output_groups(program):
        product = "cnto,cntp->op" if outputs <= MOST_ROWS else "cnto,cnto->o"
        own = [gs for use, gs in zip(program, g, strict=True) if use.num_outputs == outputs]
        total = functools.reduce(jnp.add, [_squared(product, gs, narrow) for gs in own])
        # N, where the left factor has N T: cotangents of an example's tokens are of one loss.
        factors.append(total / program[0].num_examples)
    return tuple(factors)


def _squared(product: str, array: Array, narrow: str | None) -> Array:
    array = array if narrow is None else array.astype(narrow)
    # float32 sums: with the 8 bits of bfloat16 one of equal terms stops growing after 256 of them.
    return jnp.einsum(product, array, array, preferred_element_type=accumulator(array))


def left_factor(
    program: Program,
    params: Lane,
    inputs: tuple,
    narrow: str | None = None,
    weights: Float[Array, " example"] | None = None,
) -> Float[Array, "lifted lifted"]:
    """𝒜 = Σ φ φᵀ / (N T), the second moment of the features of a factored block.

    Of φ rounded to ``narrow``, if given, with weights of mean 1.
    """
    moments = []
    for use, x in zip(program, inputs, strict=True):
        features = use.rows(use.layer.features(use.own(params), x))
        features = features if weights is None else features * jnp.sqrt(weights)[:, None, None]
        moments.append(_squared("nti,ntj->ij", features, narrow))
    tokens = sum([use.num_tokens for use in program])
    return functools.reduce(jnp.add, moments) / (program[0].num_examples * tokens)


def example_gradients(
    program: Program, params: Lane, inputs: tuple, linearized: tuple, g: Lane
) -> Lane:
    """Every example's own gradient, one row per example and column: U of F = UᵀU/N."""
    rows = _map_examples(lambda gradient: gradient, program, params, inputs, linearized, g)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), rows)


def exact_trace(
    program: Program, params: Lane, inputs: tuple, linearized: tuple, g: Lane
) -> Float[Array, ""]:
    """tr F = Σ_n ‖u_n‖² / N, at the cost of one pull-back; the u_n are not kept."""
    use, *others = program
    if use.layer.kind == "dense" and not others:
        rows = use.rows(use.layer.features(use.own(params), inputs[0]))
        width = rows.shape[-1]
        if use.num_tokens * (width + use.num_outputs) <= width * use.num_outputs:
            # ‖Σ_t φ_t g_tᵀ‖² = Σ_ts ⟨φ_t, φ_s⟩⟨g_t, g_s⟩, cheaper where tokens are few.
            alike = _squared("nti,nsi->nts", rows, None) * _squared("cnto,cnso->nts", g[0], None)
            return alike.sum() / use.num_examples

    def squared_norm(gradient: Lane) -> Array:
        return functools.reduce(jnp.add, [jnp.sum(jnp.square(p)) for p in gradient])

    squares = _map_examples(squared_norm, program, params, inputs, linearized, g)
    return squares.sum() / program[0].num_examples


def _map_examples(
    function: Callable[[Lane], Any],
    program: Program,
    params: Lane,
    inputs: tuple,
    linearized: tuple,
    g: Lane,
) -> Any:
    """``function`` of each example's own gradient, by chunk, example in it, and column."""
    num_examples = program[0].num_examples
    split = tuple([use.split_examples(x) for use, x in zip(program, inputs, strict=True)])

    def one(example: Array, xs: tuple, g: tuple) -> Any:
        total = [jnp.zeros_like(p) for p in params]
        for use, x, state, gs in zip(program, xs, linearized, g, strict=True):
            if x is None:  # the whole batch, the other examples' cotangents being zeros
                keep = jnp.arange(num_examples) == example
                pulled = use.vjp(state, jnp.where(keep[:, None, None], gs, 0))
            else:
                own = use.with_examples(1)
                pulled = own.vjp(own.layer.linearize(own.own(params), x), gs[None])
            for role, i in use.roles:
                total[i] += pulled[role].astype(total[i].dtype)
        return function(tuple(total))

    each = jax.vmap(jax.vmap(one, (None, None, 0)))  # example, column
    together = math.gcd(num_examples, EXAMPLES_AT_ONCE)

    def chunked(a: Array) -> Array:
        # Strided, not contiguous: every device keeps its own examples when they are sharded.
        return jnp.swapaxes(a.reshape(together, -1, *a.shape[1:]), 0, 1)

    by_example = tuple([jnp.moveaxis(gs, 1, 0) for gs in g])
    chunks = jax.tree.map(chunked, (jnp.arange(num_examples), split, by_example))
    return jax.lax.map(lambda chunk: each(*chunk), chunks)


def accumulator(array: Array) -> Any:
    """The dtype that sums of an array are kept in: float32 or better."""
    return jnp.promote_types(array.dtype, jnp.float32)
