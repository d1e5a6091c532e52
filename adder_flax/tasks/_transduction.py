"""Sequences and what they are to be turned into: spelling to phonemes."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from adder_flax import data, recorder
from adder_flax.arrays import AnyArray
from adder_flax.data._sequences import END, PAD
from adder_flax.models import Example, beam_search
from adder_flax.registry import load
from adder_flax.settings import setting
from adder_flax.tasks._task import Batch, Best, Outcome, Task, call_to_train, register_task

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class TransductionSettings:
    """Turning sequences into others."""

    name: str = setting(
        "transduction", "the task, whose own fields follow", expected="the name of a task"
    )
    label_smoothing: float = setting(
        0.0, "share of the targets that all symbols get", data=True, ge=0, lt=1
    )
    num_beams: int = setting(
        1, "kept while the model writes; 1 takes the likeliest symbol each time", ge=1, le=1024
    )


class SequenceFacts(NamedTuple):
    """What transduction has to know of a source.

    Attributes:
      source_symbols, target_symbols: how many there are, what fills up and what ends included.
      source_length, target_length: of the rows to learn from.
      longest: target that the data have, its end included: where decoding stops.
    """

    source_symbols: int
    target_symbols: int
    source_length: int
    target_length: int
    longest: int


@register_task("transduction", TransductionSettings)
class Transduction(Task[SequenceFacts]):
    """Mean cross-entropy of the target's symbols given those before them; scores by own writing.

    A source gives ``"source"``, int32 (batch, source), and to learn from ``"target"``, int32
    (batch, target), ended by `END` and filled up with `PAD`. To evaluate, ``"references"``, int32
    (batch, references, target), holds every right answer; rows of `PAD` alone are none. The model
    is called with (source, target) and writes with its ``encode`` and ``step``, see
    `adder_flax.models.Seq2Seq`.

    The error of a word is the least number of edits to one of its references; the symbol error rate
    is the sum of edits over the sum of the lengths of those references, and the word error rate the
    share of words with any.
    """

    unit: ClassVar[str] = "words"
    best: ClassVar[Best] = Best("phoneme_error_rate", largest=False)

    @classmethod
    def facts(cls, source: data.Source) -> SequenceFacts:
        pairs = data.require_kind(data.SequenceSource, source, "config.task.name=transduction")
        symbols = [len(pairs.symbols[kind]) for kind in ("source", "target")]
        lengths = [pairs.arrays[kind].shape[-1] for kind in ("source", "target")]
        return SequenceFacts._make([*symbols, *lengths, pairs.longest])

    def example(self) -> Example:
        facts = self.data_facts
        row = lambda length: jax.ShapeDtypeStruct((1, length), jnp.int32)
        sizes = {"source_symbols": facts.source_symbols, "target_symbols": facts.target_symbols}
        return Example((row(facts.source_length), row(facts.target_length)), sizes)

    def examples(self, key: Array, batch: Batch) -> tuple[AnyArray, AnyArray]:
        """Returns sources and targets as they are."""
        del key
        return batch["source"], batch["target"]

    def arguments(self, examples: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
        return examples

    def loss(
        self, model: nnx.Module, examples: tuple[AnyArray, AnyArray], *, rngs: nnx.Rngs
    ) -> Outcome:
        _, target = examples
        real = target != PAD
        logits = call_to_train(model, *self.arguments(examples), rngs=rngs).astype(jnp.float32)
        # Constant where nothing is to be said: such places have neither gradient nor curvature.
        logits = jnp.where(real[..., None], logits, 0.0)
        classes = jax.nn.one_hot(target, logits.shape[-1])
        smoothed = optax.smooth_labels(classes, self.settings.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, smoothed)
        hits = logits.argmax(-1) == target
        mean = lambda values: (values * real).sum() / jnp.maximum(real.sum(), 1)
        return Outcome(mean(losses), logits, {"symbol_accuracy": mean(hits)}, weights=real)

    def inputs(self, batch: Batch) -> tuple[AnyArray, AnyArray]:
        return batch["source"], batch["references"][:, 0]

    def write(
        self, model: Any, source: Int[AnyArray, "batch source"]
    ) -> Int[Array, "batch target"]:
        """Returns what the model makes of the sources, ended and filled up with `END`."""
        memory = model.encode(source)

        def step(state, symbol):
            memory, state = state
            state, logits = model.step(memory, state, symbol)
            return (memory, state), logits

        options = dict(max_length=self.data_facts.longest, num_beams=self.settings.num_beams)
        start = (memory, memory.start)
        return beam_search(step, start, len(source), end_symbol=END, **options)[0][:, 0]

    def sums(self, model: nnx.Module, batch: Batch) -> dict[str, Float[Array, ""]]:
        mask = batch["mask"]
        source, first = self.inputs(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(source, first), first)
        real = (first != PAD) & mask[:, None]
        edits, lengths = closest(self.write(model, source), batch["references"])
        counted = {
            "symbols": real,
            "edits": edits * mask,
            "phonemes": lengths * mask,
            "wrong": (edits > 0) & mask,
            "count": mask,
        }
        sums = {name: values.sum().astype(jnp.float32) for name, values in counted.items()}
        return {"symbol_loss": (losses * real).sum(), **sums}

    def scores(self, sums: dict[str, float]) -> dict[str, float]:
        return {
            "loss": sums["symbol_loss"] / sums["symbols"],
            "phoneme_error_rate": sums["edits"] / sums["phonemes"],
            "word_error_rate": sums["wrong"] / sums["count"],
        }

    def about(self) -> str:
        return f"{self.data_facts.source_symbols} and {self.data_facts.target_symbols} symbols"

    def pictures(
        self, model: nnx.Module, source: data.SequenceSource, title: str
    ) -> dict[str, Callable[[], Any]]:
        draw = load("adder_flax.report.figures:alignment_figure")
        return {"attention.png": lambda: draw(*self._alignments(model, source), title=title)}

    def _alignments(self, model: nnx.Module, source: data.SequenceSource) -> tuple[list, ...]:
        """Returns sources and what is written for them, as symbols, and the alignments of both."""
        # The longest of the first words: there is more to see.
        letters = source.first(100)["source"]
        letters = letters[np.argsort(-(letters != PAD).sum(-1), kind="stable")[:_SHOWN]]
        written = jax.jit(self.write)(model, letters)
        _, records = recorder.record({"attention": ["weights"]}, model, letters, written)
        weights = np.asarray(records[-1].arrays["weights"])[:, 0]
        columns = [source.text("source", row) for row in letters]
        rows = [source.text("target", row) for row in np.asarray(written)]
        maps = [w[: len(r), : len(c)] for w, r, c in zip(weights, rows, columns, strict=True)]
        return columns, rows, maps


def closest(
    written: Int[Array, "batch written"], references: Int[AnyArray, "batch references target"]
) -> tuple[Int[Array, " batch"], Int[Array, " batch"]]:
    """Returns the least number of edits to a reference, and the length of that reference.

    >>> references = jnp.array([[[5, 7, 6, END], [5, END, PAD, PAD], [PAD, PAD, PAD, PAD]]])
    >>> closest(jnp.array([[5, 6, END, END]]), references)
    (Array([1], dtype=int32), Array([3], dtype=int32))
    """
    lengths = length_to(references, END)
    guess = jnp.broadcast_to(written[:, None], (*references.shape[:2], written.shape[-1]))
    edits = edit_distance(guess, references, length_to(guess, END), lengths)
    present: Bool[Array, "batch references"] = references[..., 0] != PAD
    best = jnp.where(present, edits, jnp.iinfo(edits.dtype).max).argmin(-1, keepdims=True)
    take = lambda x: jnp.take_along_axis(x, best, axis=-1)[:, 0]
    return take(edits), take(lengths)


def edit_distance(
    guess: Int[Array, "*batch guess"],
    truth: Int[AnyArray, "*batch truth"],
    guess_length: Int[Array, "*batch"],
    truth_length: Int[Array, "*batch"],
) -> Int[Array, "*batch"]:
    """Least number of insertions, deletions and substitutions between two sequences (Levenshtein).

    Row i of Wagner and Fischer's table, D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] +
    [g_i ≠ t_j]), in a scan over i. Within a row, the chain of insertions D[i, j-1] + 1 is a running
    minimum of D - j. What stands behind a sequence's length does not count.

    >>> one = jnp.array
    >>> int(edit_distance(one([1, 2, 3]), one([1, 3, 0, 0]), one(3), one(2)))
    1
    """
    places = jnp.arange(truth.shape[-1] + 1)
    first = jnp.broadcast_to(places, (*truth.shape[:-1], len(places)))

    def row(above, now):
        symbol, index = now
        substituted = above[..., :-1] + (symbol[..., None] != truth)
        other = jnp.minimum(above[..., 1:] + 1, substituted)
        inserted = jnp.broadcast_to(index + 1, (*above.shape[:-1], 1))
        candidates = jnp.concatenate([inserted, other], axis=-1)
        below = jax.lax.cummin(candidates - places, axis=candidates.ndim - 1) + places
        return jnp.where(index < guess_length[..., None], below, above), None

    steps = (jnp.moveaxis(guess, -1, 0), jnp.arange(guess.shape[-1]))
    last, _ = jax.lax.scan(row, first, steps)
    return jnp.take_along_axis(last, truth_length[..., None], axis=-1)[..., 0]


def length_to(symbols: Int[AnyArray, "*batch time"], end: int) -> Int[Array, "*batch"]:
    """How many symbols stand before the first `end`, or all of them."""
    return jnp.cumprod(symbols != end, axis=-1).sum(-1)
