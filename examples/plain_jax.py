"""Adder attention in plain JAX: scikit-learn's digits, the eight rows of an image as eight tokens.

    pip install . scikit-learn  # in the repository, once
    python plain_jax.py         # anywhere

It prints a test accuracy of about 0.96 after some seconds on a CPU.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from adder_flax.attention import adder_attention

WIDTH, NUM_HEADS, NUM_CLASSES = 32, 4, 10


def load_data():
    """Rows of pixels in [-1, 1], (images, 8, 8), and labels; 360 images to test on."""
    pixels, labels = load_digits(return_X_y=True)
    rows = (pixels.reshape(-1, 8, 8) / 8.0 - 1.0).astype("float32")
    return train_test_split(rows, labels, test_size=360, random_state=0)


def init(key):
    shapes = dict(
        embed=(8, WIDTH),
        position=(8, WIDTH),
        qkv=(3, WIDTH, NUM_HEADS, WIDTH // NUM_HEADS),
        out=(WIDTH, WIDTH),
        head=(WIDTH, NUM_CLASSES),
    )
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.3 * jax.random.normal(k, shapes[name]) for name, k in zip(shapes, keys, strict=True)
    }


def classify(params, rows):
    tokens = rows @ params["embed"] + params["position"]
    query, key, value = jnp.einsum("bnd,pdhe->pbnhe", tokens, params["qkv"])
    mixed = adder_attention(query, key, value)  # (batch, tokens, heads, head_dim), as in Flax
    tokens = jax.nn.gelu(tokens + mixed.reshape(tokens.shape) @ params["out"])
    return tokens.mean(axis=1) @ params["head"]


def main(num_steps=200):
    train_rows, test_rows, train_labels, test_labels = load_data()
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = classify(params, train_rows)
            return optax.softmax_cross_entropy_with_integer_labels(logits, train_labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params = init(jax.random.key(0))
    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    accuracy = float((classify(params, test_rows).argmax(-1) == test_labels).mean())
    print(f"plain JAX: test accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    main()
