"""Attention in float64 NumPy, written from the formulas: the truth of the tests here."""

import numpy as np


def scores(name, query, key, parameters):
    """Raw scores (..., heads, q_length, k_length) from Flax's layout, one pair of tokens at a time
    in every formula."""
    q = np.swapaxes(np.asarray(query, np.float64), -2, -3)[..., :, None, :]
    k = np.swapaxes(np.asarray(key, np.float64), -2, -3)[..., None, :, :]
    if q.shape[-4] != k.shape[-4]:
        k = np.repeat(k, q.shape[-4] // k.shape[-4], axis=-4)
    p = {n: np.asarray(x, np.float64) for n, x in parameters.items()}
    if name == "dot":
        return (q * k).sum(-1)
    if name == "adder":
        return -np.abs(q - k).sum(-1)
    if name == "gaussian":
        return -np.square(q - k).sum(-1) / 2
    if name == "bilinear":
        return np.einsum("...hqxd,...hxke,hde->...hqk", q, k, p["kernel"])
    projected_query = np.einsum("...hqxd,hda->...hqxa", q, p["query_kernel"])
    projected_key = np.einsum("...hxkd,hda->...hxka", k, p["key_kernel"])
    hidden = projected_query + projected_key
    if "norm_scale" in p:
        hidden = hidden - hidden.mean(-1, keepdims=True)
        hidden = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + 1e-6)
        hidden = hidden * p["norm_scale"][:, None, None]
    return np.einsum("...hqka,ha->...hqk", np.tanh(hidden + p["bias"][:, None, None]), p["v"])


def default_scale(name, head_dim):
    return 1.0 if name == "additive" else head_dim**-0.5


def softmax(logits, visible):
    """Softmax over the last axis of what is visible; zeros where nothing is."""
    out = np.zeros_like(logits)
    visible = np.broadcast_to(visible, logits.shape)
    for row in np.ndindex(logits.shape[:-1]):
        if visible[row].any():
            exponentials = np.exp(logits[row][visible[row]] - logits[row][visible[row]].max())
            out[row][visible[row]] = exponentials / exponentials.sum()
    return out


def attention(
    name,
    query,
    key,
    value,
    parameters=None,
    *,
    scale=None,
    temperature=1.0,
    bias=0.0,
    mask=True,
    identity=False,
):
    """Output in Flax's layout and the map that multiplies the values."""
    raw = scores(name, query, key, parameters or {})
    scale = default_scale(name, key.shape[-1]) if scale is None else scale
    weights = softmax(raw * scale / temperature + bias, mask)
    if identity:
        weights = weights + np.eye(weights.shape[-1])
    value = np.swapaxes(np.asarray(value, np.float64), -2, -3)
    value = np.repeat(value, weights.shape[-3] // value.shape[-3], axis=-3)
    return np.swapaxes(weights @ value, -2, -3), weights
