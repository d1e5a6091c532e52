"""Walks a jaxpr and counts the arithmetic of its equations for ``operations.py``."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from adder_flax import jaxprs, ops
from adder_flax.registry import Registry

ADD = "additions"
MULTIPLY = "multiplications"
COMPARE = "comparisons"
EXPONENTIAL = "exponentials"
DIVIDE = "divisions"
ROOT = "roots"
L1 = "l1_elements"
KINDS = (ADD, MULTIPLY, COMPARE, EXPONENTIAL, DIVIDE, ROOT)


def _of(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


# One operation of this kind per element of the result.
_ELEMENTWISE = {
    **_of(ADD, "add sub add_any"),
    **_of(MULTIPLY, "mul square"),
    **_of(COMPARE, "max min eq ne lt le gt ge eq_to le_to lt_to"),
    **_of(COMPARE, "sign is_finite floor ceil round nextafter"),
    **_of(EXPONENTIAL, "exp exp2 expm1 log log1p logistic pow"),
    **_of(EXPONENTIAL, "tanh sinh cosh asinh acosh atanh erf erfc erf_inv"),
    **_of(EXPONENTIAL, "sin cos tan asin acos atan atan2"),
    **_of(EXPONENTIAL, "lgamma digamma bessel_i0e bessel_i1e"),
    **_of(DIVIDE, "div rem"),
    **_of(ROOT, "sqrt rsqrt cbrt"),
}

# One operation of this kind per element of the first operand: a reduction fills an accumulator that
# starts empty, so K terms are K additions, as published multiply-accumulate counts have it.
_REDUCTIONS = {
    **_of(ADD, "reduce_sum cumsum psum psum2 psum_invariant reduce_scatter"),
    **_of(MULTIPLY, "reduce_prod cumprod"),
    **_of(COMPARE, "reduce_max reduce_min argmax argmin cummax cummin pmax pmin"),
}

# One per element of what is put into another array, the operand of this number.
_UPDATES = {
    "addupdate": (ADD, 1),
    **dict.fromkeys(("scatter-add", "scatter_add"), (ADD, 2)),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), (MULTIPLY, 2)),
    **dict.fromkeys(("scatter-max", "scatter_max"), (COMPARE, 2)),
    **dict.fromkeys(("scatter-min", "scatter_min"), (COMPARE, 2)),
}

# The result is the operand seen through other strides: nothing moves.
_VIEWS = _of(
    "view",
    "reshape broadcast_in_dim squeeze expand_dims transpose stop_gradient name copy_p pvary "
    "optimization_barrier reduce_precision sharding_constraint mesh_cast",
)

# Sign bits, selections and data movement: no arithmetic.
_FREE = _VIEWS | _of(
    "free",
    "neg abs real imag conj complex copy convert_element_type bitcast_convert_type select_n slice "
    "dynamic_slice dynamic_update_slice gather scatter concatenate stack unstack tile pad rev iota "
    "split empty and or not xor shift_left shift_right_logical shift_right_arithmetic "
    "population_count clz reduce_and reduce_or reduce_xor all_gather all_gather_invariant "
    "all_to_all ppermute pbroadcast reshard axis_index device_put get swap program_id num_programs "
    "create_token",
)

Count = Callable[[Any], Mapping[str, int]]
KERNELS: Registry[Count] = Registry("operation count", "adder_flax.counting.declare_operations")


class Tally:
    """Counts while walking, per layer and (kind, dtype), bytes moved, and what was not counted."""

    def __init__(self):
        self.counts: dict[str, Counter] = {}
        self.bytes_moved: Counter = Counter()
        self.uncounted: Counter = Counter()

    def add(self, layer: str, kind: str, dtype: Any, amount: int) -> None:
        if amount:
            self.counts.setdefault(layer, Counter())[kind, str(np.dtype(dtype))] += amount

    def merge(self, other: "Tally", times: int) -> None:
        pairs = [(self.bytes_moved, other.bytes_moved), (self.uncounted, other.uncounted)]
        for layer, counts in other.counts.items():
            pairs.append((self.counts.setdefault(layer, Counter()), counts))
        for mine, theirs in pairs:
            for key, amount in theirs.items():
                mine[key] += times * amount

    def arithmetic(self) -> int:
        """All counted operations, to compare the branches of a conditional."""
        amounts = (item for counts in self.counts.values() for item in counts.items())
        return sum(amount for (kind, _), amount in amounts if kind != L1)


def size(variable: Any) -> int:
    """Number of elements of a jaxpr variable or literal, 0 of a token."""
    return math.prod(getattr(variable.aval, "shape", (0,)))


def nbytes(variable: Any) -> int:
    """Bytes of a jaxpr variable or literal; a PRNG key is two 32-bit words."""
    dtype = getattr(variable.aval, "dtype", None)
    if dtype is None:
        return 0
    return size(variable) * int(getattr(dtype, "itemsize", 8))


def walk(jaxpr: Any, tally: Tally, layer_of: Callable[[str], str], outer: str = "") -> None:
    """Adds the operations of every equation of an open ``jaxpr``, held by one with the name stack
    ``outer``; ``layer_of`` gives the layer of an equation by its own.
    """
    l1 = _l1_distances(jaxpr)
    traffic = _Traffic(l1)
    for equation in jaxpr.eqns:
        stack = jaxprs.scope(outer, equation)
        layer = layer_of(stack)
        tally.bytes_moved[layer] += 0  # every layer appears, in the order of the program
        name = _kernel_name(equation)
        if name in KERNELS:
            for kind, amount in KERNELS.get(name)(equation).items():
                tally.add(layer, kind, equation.outvars[0].aval.dtype, amount)
        elif (terms := ops.byte_terms(equation)) is not None:
            for kind, dtype in ((ADD, "uint8"), (ADD, "int32"), (L1, "uint8")):
                tally.add(layer, kind, dtype, terms)
        else:
            # Of a sum over pairs its formula, whatever kernel would run.
            formula = ops.formula(equation)
            inner = [formula.jaxpr] if formula else jaxprs.inner_programs(equation)
            if inner and name not in _UPDATES:  # these hold the operation on one element
                _walk_inner(equation, inner, tally, layer_of, stack)
                continue
            _count(equation, tally, layer)
        if id(equation) in l1:
            tally.add(layer, L1, equation.outvars[0].aval.dtype, size(equation.invars[0]))
        tally.bytes_moved[layer] += traffic.of(equation)


def _count(equation: Any, tally: Tally, layer: str) -> None:
    name, params = equation.primitive.name, equation.params
    out: Any = equation.outvars[0] if equation.outvars else None
    if name in _ELEMENTWISE:
        tally.add(layer, _ELEMENTWISE[name], equation.invars[0].aval.dtype, size(out))
    elif name in _REDUCTIONS:
        tally.add(layer, _REDUCTIONS[name], equation.invars[0].aval.dtype, size(equation.invars[0]))
    elif name == "dot_general":
        _count_products(equation, tally, layer, dot_general_macs(equation))
    elif name == "conv_general_dilated":
        _count_products(equation, tally, layer, convolution_macs(equation))
    elif name == "integer_pow":
        power = abs(params["y"])
        products = (power.bit_length() + power.bit_count() - 2) * (power > 0)
        tally.add(layer, MULTIPLY, out.aval.dtype, size(out) * products)
        tally.add(layer, DIVIDE, out.aval.dtype, size(out) * (params["y"] < 0))
    elif name == "clamp":
        tally.add(layer, COMPARE, out.aval.dtype, 2 * size(out))
    elif name in _UPDATES:
        kind, place = _UPDATES[name]
        tally.add(layer, kind, equation.invars[place].aval.dtype, size(equation.invars[place]))
    elif name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min"):
        kind = ADD if name.endswith("sum") else COMPARE
        tally.add(layer, kind, out.aval.dtype, size(out) * math.prod(params["window_dimensions"]))
    elif name in ("sort", "top_k"):
        aval = equation.invars[0].aval
        axis = params.get("dimension", params.get("axis", -1))
        rounds = max(aval.shape[axis] - 1, 0).bit_length()
        tally.add(layer, COMPARE, aval.dtype, size(equation.invars[0]) * rounds)
    elif name not in _FREE:
        tally.uncounted[_kernel_name(equation)] += 1


def _count_products(equation: Any, tally: Tally, layer: str, macs: int) -> None:
    """A MAC is one multiplication in the operands' number type and one addition in the result's."""
    tally.add(layer, MULTIPLY, np.result_type(*(v.aval.dtype for v in equation.invars)), macs)
    tally.add(layer, ADD, equation.outvars[0].aval.dtype, macs)


def dot_general_macs(equation: Any) -> int:
    """Multiply-accumulates: elements of the result times contracted extent."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return size(equation.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def convolution_macs(equation: Any) -> int:
    """Multiply-accumulates of a convolution, without taps on padding or between dilated inputs."""
    params = equation.params
    numbers = params["dimension_numbers"]
    image, kernel, out = (v.aval.shape for v in (*equation.invars[:2], equation.outvars[0]))
    taps = 1
    for dim, stride in enumerate(params["window_strides"]):
        starts = np.arange(out[numbers.out_spec[2 + dim]])[:, None] * stride
        steps = np.arange(kernel[numbers.rhs_spec[2 + dim]]) * params["rhs_dilation"][dim]
        place, dilation = starts + steps - params["padding"][dim][0], params["lhs_dilation"][dim]
        last = (image[numbers.lhs_spec[2 + dim]] - 1) * dilation
        taps *= int(((place % dilation == 0) & (place >= 0) & (place <= last)).sum())
    return taps * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * kernel[numbers.rhs_spec[1]]


def _walk_inner(
    equation: Any, inner: list, tally: Tally, layer_of: Callable[[str], str], stack: str
) -> None:
    """Loops as often as they run, a sharded map on all devices, of a conditional the dearest."""
    name, params, parts, times = equation.primitive.name, equation.params, [], 1
    if name == "custom_linear_solve":  # its products and transposed solver are for derivatives
        inner = [params["jaxprs"].solve.jaxpr]
    for jaxpr in inner:
        parts.append(Tally())
        walk(jaxpr, parts[-1], layer_of, stack)
    if name == "cond":
        parts = [max(parts, key=Tally.arithmetic)]
    elif name == "scan":
        times = params["length"]
    elif name == "shard_map":
        axes = params.get("manual_axes", params["mesh"].axis_names)
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    elif name == "pallas_call":
        times = math.prod(params["grid_mapping"].grid)
    elif name == "reduce":
        times = size(equation.invars[0])
    elif name == "reduce_window":
        times = size(equation.outvars[0]) * math.prod(params["window_dimensions"])
    elif name == "while":
        tally.uncounted["while: trips beyond the first"] += 1
    for part in parts:
        tally.merge(part, times)


def _kernel_name(equation: Any) -> str:
    params = equation.params
    if "target_name" in params:
        return str(params["target_name"])
    if equation.primitive.name == "pallas_call":
        source = params.get("name_and_src_info")
        return str(params.get("name") or getattr(source, "name", "pallas_call"))
    return equation.primitive.name


def _l1_distances(jaxpr: Any) -> dict[int, tuple]:
    """By the id of the sum of an L1 distance, the equations (absolute value, difference) in it."""
    producer = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def source(equation: Any, name: str) -> Any:
        """The equation of that name whose result, perhaps converted, is the first operand."""
        made, passed = equation, True
        while passed:
            operand = None if made is None else made.invars[0]
            made = None if operand is None or _is_literal(operand) else producer.get(operand)
            passed = made is not None and made.primitive.name == "convert_element_type"
        return made if made is not None and made.primitive.name == name else None

    sums = (equation for equation in jaxpr.eqns if equation.primitive.name == "reduce_sum")
    terms = {id(total): source(total, "abs") for total in sums}
    found = {total: (absolute, source(absolute, "sub")) for total, absolute in terms.items()}
    return {total: pair for total, pair in found.items() if pair[1] is not None}


class _Traffic:
    """Bytes that each equation of one jaxpr reads and writes.

    Views move nothing, and whoever reads a view is charged for the array behind it. The difference,
    absolute value and sum of an L1 distance are one equation: nothing that computes one in earnest
    stores the terms.
    """

    def __init__(self, l1: dict[int, tuple]):
        self._operands = {key: difference.invars for key, (_, difference) in l1.items()}
        self._fused = {id(equation) for terms in l1.values() for equation in terms}
        self._behind: dict[Any, int] = {}

    def of(self, equation: Any) -> int:
        if equation.primitive.name in _VIEWS:
            self._behind[equation.outvars[0]] = sum(self._read(v) for v in equation.invars)
            return 0
        if id(equation) in self._fused:
            return 0
        read = sum(self._read(v) for v in self._operands.get(id(equation), equation.invars))
        return read + sum(nbytes(v) for v in equation.outvars)

    def _read(self, variable: Any) -> int:
        own = nbytes(variable)
        return own if _is_literal(variable) else self._behind.get(variable, own)


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
