"""A vision transformer in float64 NumPy that reads timm's arrays, by timm's own order of
operations."""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def timm_forward(weights, images, *, patch_size, depth, num_heads):
    """Returns logits of NHWC images from arrays in the names and layouts of timm's
    VisionTransformer."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    batch, height, width, _ = images.shape
    # A convolution whose stride is its size.
    grid = (batch, height // patch_size, patch_size, width // patch_size, patch_size, -1)
    tokens = np.einsum("byhxwc,ochw->byxo", images.reshape(grid), w["patch_embed.proj.weight"])
    tokens = tokens.reshape(batch, -1, tokens.shape[-1]) + w["patch_embed.proj.bias"]
    x = np.concatenate([np.repeat(w["cls_token"], batch, axis=0), tokens], axis=1) + w["pos_embed"]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    for block in (f"blocks.{i}" for i in range(depth)):
        qkv = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x))
        q, k, v = qkv.reshape(batch, x.shape[1], 3, num_heads, -1).transpose(2, 0, 3, 1, 4)
        logits = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        maps = np.exp(logits - logits.max(-1, keepdims=True))
        maps /= maps.sum(-1, keepdims=True)
        x = x + linear(f"{block}.attn.proj", (maps @ v).swapaxes(1, 2).reshape(x.shape))
        hidden = linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x))
        x = x + linear(f"{block}.mlp.fc2", hidden * (1 + _erf(hidden / math.sqrt(2))) / 2)
    return linear("head", norm("norm", x)[:, 0])
