"""Collectives read from HLO text: loops, asynchronous pairs, fused forms, and programs that JAX
compiles."""

import subprocess
import sys

from adder_flax.training.hlo import Traffic, collectives
from tests.processes import ROOT, simulated_devices

PROGRAM = """
HloModule jit_step, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p.1: bf16[8,16]) -> bf16[1,16] {
  %p.1 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %whole = bf16[8,16]{1,0:T(8,128)(2,1)} all-reduce(%p.1), channel_id=3, to_apply=%add
  ROOT %part = bf16[1,16]{1,0} dynamic-slice(%whole, %zero, %zero), dynamic_slice_sizes={1,16}
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %gather-start = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), dimensions={0}
  %gather-done = f32[32,8]{1,0} all-gather-done(%gather-start)
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%i, %x)
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %pair = (f32[4,8]{1,0:T(8,128)}, /*index=1*/f32[2]{0}) all-reduce(%p, %q), channel_id=1, to_apply=%add
  %scatter = f32[1,8]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add
  %fused = bf16[1,16]{1,0} fusion(%big), kind=kCustom, calls=%all-reduce-scatter.1
  %loop = (s32[], f32[4,8]{1,0}) while(%s), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501 - lines of another language


def test_each_kind_is_counted_with_its_bytes_and_turns():
    assert collectives(PROGRAM) == {
        "all-reduce": Traffic(1, (4 * 8 + 2) * 4),
        "all-gather": Traffic(5, 5 * 32 * 8 * 4),
        "reduce-scatter": Traffic(2, 4 * 8 * 4 + 8 * 16 * 2),
    }


def test_a_collective_that_goes_on_beside_other_work_is_one():
    gather = "all-gather(%p), channel_id=7, dimensions={0}"
    fusions = [
        f"%beside.{i} (p: f32[4,8]) -> f32[32,8] {{\n  ROOT %g = f32[32,8]{{1,0}} {gather}\n}}\n"
        for i in range(3)
    ]
    calls = [f"  %f.{i} = f32[32,8]{{1,0}} fusion(%p), calls=%beside.{i}" for i in range(3)]
    other = f"  %other = f32[32,8]{{1,0}} {gather.replace('7', '8')}"
    entry = ["ENTRY %main (p: f32[4,8]) -> f32[32,8] {", *calls, other, "}"]
    assert collectives("\n".join([*fusions, *entry])) == {"all-gather": Traffic(2, 2 * 32 * 8 * 4)}


COMPILED = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adder_flax.training.hlo import collectives

mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=rows)

def text(f, out):
    return collectives(jax.jit(f, out_shardings=out).lower(x).compile().as_text())

print(text(lambda x: x * 2, rows))
print(text(lambda x: x.sum(0), whole))
print(text(lambda x: x * 2, whole))
print(text(lambda x: jax.lax.scan(lambda c, _: (c * x.sum(), None), 1.0, length=3)[0], whole))
"""


def test_programs_that_jax_compiles():
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=simulated_devices(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    nothing, reduced, gathered, looped = done.stdout.splitlines()
    assert nothing == "{}"
    assert reduced == "{'all-reduce': Traffic(count=1, bytes=64)}"
    assert gathered == "{'all-gather': Traffic(count=1, bytes=512)}"
    assert "all-reduce" in looped
