"""Sequence to sequence with attention: a bidirectional GRU reads, a GRU with attention writes."""

import dataclasses
from typing import Any, Literal, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from adder_flax.attention import SequenceAttention
from adder_flax.layers import Dropout, Linear
from adder_flax.models._registry import Example, check_score_options, register_model
from adder_flax.settings import AttentionSettings, keywords_of, setting


@dataclasses.dataclass(frozen=True)
class Seq2SeqSettings(AttentionSettings):
    """Encoder and decoder with attention between them."""

    name: str = setting(
        "seq2seq", "the model, whose own fields follow", expected="the name of a model"
    )
    width: int = setting(
        256, "of the states; even, as each direction reads with half of it", ge=2, le=65536
    )
    embedding_features: int = setting(64, "of the symbols", ge=1, le=65536)
    dropout_rate: float = setting(
        0.2, "of embeddings and of what gives the logits", data="if on", ge=0, lt=1
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the computation")


class Memory(NamedTuple):
    """What the decoder knows of the source.

    Attributes:
      states: of the encoder at each symbol, which attention mixes.
      mask: True at symbols, False where a row is filled up.
      start: the decoder's first state.
    """

    states: Float[Array, "batch source width"]
    mask: Bool[Array, "batch source"]
    start: Float[Array, "batch width"]


class Seq2Seq(nnx.Module):
    """Encoder and decoder of GRUs with attention between them.

    The decoder's state s_t is the query, the encoder's states h_i are keys and values; the context
    c_t and s_t give the logits, softmax(W tanh(W_c [c_t; s_t])) (Luong et al., 2015,
    https://arxiv.org/abs/1508.04025, eq. 5-6, global attention without input feeding: with the
    targets given, all steps attend at once). The encoder is bidirectional (Bahdanau et al., 2015,
    https://arxiv.org/abs/1409.0473).

    Symbols are numbers; 0 fills a row up and `end_symbol` ends a target and stands before its first
    symbol.

    Args:
      source_symbols, target_symbols: how many there are, filling and end included.
      settings: of the model; each of its fields can be given as a keyword instead.
      end_symbol: number of the end.
      dtype: dtype of the computation; None for that of the parameters.

    >>> sizes = dict(source_symbols=5, target_symbols=7, width=8, embedding_features=4)
    >>> model = Seq2Seq(**sizes, rngs=nnx.Rngs(0))
    >>> source, target = jnp.array([[1, 2, 3, 0]]), jnp.array([[4, 5, 1]])
    >>> model(source, target).shape
    (1, 3, 7)
    """

    @keywords_of(Seq2SeqSettings, but=("name",))
    def __init__(
        self,
        *,
        source_symbols: int,
        target_symbols: int,
        settings: Seq2SeqSettings = Seq2SeqSettings(),
        end_symbol: int = 1,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        width, embedding_features = settings.width, settings.embedding_features
        if width < 2 or width % 2:
            raise ValueError(
                f"expected an even width of at least 2, got {width}; each direction reads with "
                "half of it"
            )
        shared: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.end_symbol = end_symbol
        self.source_embedding = nnx.Embed(source_symbols, embedding_features, **shared)
        self.target_embedding = nnx.Embed(target_symbols, embedding_features, **shared)
        self.forward = nnx.GRUCell(embedding_features, width // 2, **shared)
        self.backward = nnx.GRUCell(embedding_features, width // 2, **shared)
        self.bridge = Linear(width, width, **shared)
        self.decoder = nnx.GRUCell(embedding_features, width, **shared)
        self.attention = SequenceAttention(
            width, width, settings=settings.attention, param_dtype=param_dtype, rngs=rngs
        )
        self.combine = Linear(2 * width, width, **shared)
        self.head = Linear(width, target_symbols, **shared)
        self.dropout = Dropout(settings.dropout_rate)

    def __call__(
        self,
        source: Int[Array, "batch source"],
        target: Int[Array, "batch target"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch target symbols"]:
        """Logits of every target symbol, given the source and the targets before it."""
        random: dict[str, Any] = dict(deterministic=deterministic, rngs=rngs)
        memory = self.encode(source, **random)
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=self.end_symbol)
        embedded = self.dropout(self.target_embedding(before), **random)
        states = _run(self.decoder, embedded, jnp.ones(before.shape, bool), memory.start)
        return self.read_out(states, memory, **random)

    def set_data(self, settings: Any) -> None:
        """Takes the rate of dropout anew, where it is on; it may be traced."""
        self.dropout.set_rate(settings.dropout_rate)

    def encode(
        self,
        source: Int[Array, "batch source"],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Memory:
        """Reads the source."""
        mask = source != 0
        embedded = self.dropout(
            self.source_embedding(source), deterministic=deterministic, rngs=rngs
        )
        zero = jnp.zeros((source.shape[0], self.forward.hidden_features), embedded.dtype)
        onward = _run(self.forward, embedded, mask, zero)
        back = _run(self.backward, embedded[:, ::-1], mask[:, ::-1], zero)[:, ::-1]
        ends = jnp.concatenate([onward[:, -1], back[:, 0]], axis=-1)
        return Memory(jnp.concatenate([onward, back], axis=-1), mask, jnp.tanh(self.bridge(ends)))

    def step(
        self, memory: Memory, state: Float[Array, "batch width"], symbol: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch width"], Float[Array, "batch symbols"]]:
        """The decoder's next state and the logits that follow, behind one symbol."""
        state, _ = self.decoder(state, self.target_embedding(symbol))
        return state, self.read_out(state[:, None], memory)[:, 0]

    def read_out(
        self,
        states: Float[Array, "batch target width"],
        memory: Memory,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch target symbols"]:
        """Logits of decoder states."""
        context: Any = self.attention(states, memory.states, mask=memory.mask[:, None, :])
        combined = jnp.tanh(self.combine(jnp.concatenate([context, states], axis=-1)))
        logits = self.head(self.dropout(combined, deterministic=deterministic, rngs=rngs))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _run(
    cell: nnx.GRUCell,
    inputs: Float[Array, "batch time features"],
    mask: Bool[Array, "batch time"],
    state: Float[Array, "batch width"],
) -> Float[Array, "batch time width"]:
    """States of a recurrent cell over time; where the mask is False the state stays as it is."""

    def step(state, now):
        x, present = now
        state = jnp.where(present[:, None], cell(state, x)[0], state)
        return state, state

    _, states = jax.lax.scan(step, state, (inputs.swapaxes(0, 1), mask.T))
    return states.swapaxes(0, 1)


@register_model("seq2seq", Seq2SeqSettings)
def build_seq2seq(settings: Seq2SeqSettings, example: Example, *, rngs: nnx.Rngs) -> Seq2Seq:
    """Builds a sequence model for ``source_symbols`` and ``target_symbols``."""
    if "target_symbols" not in example.sizes:
        raise ValueError(
            f"expected pairs of sequences for config.model.name=seq2seq, got {example}; set "
            "--config.model.name or --config.task.name"
        )
    attention = settings.attention
    if not isinstance(attention.score, str) or attention.identity:
        raise ValueError(
            "expected one score and no identity map (positions of two sequences are not the same) "
            f"for config.model.name=seq2seq, got {attention.score} and identity "
            f"{attention.identity}; set --config.model.*"
        )
    check_score_options(attention)
    symbols = {name: example.sizes[name] for name in ("source_symbols", "target_symbols")}
    return Seq2Seq(**symbols, settings=settings, dtype=jnp.dtype(settings.dtype), rngs=rngs)
