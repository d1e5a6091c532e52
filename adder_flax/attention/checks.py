"""Checks of shapes and settings that functions and modules share, each with one clear message."""

from adder_flax.arrays import AnyArray


def require_equal_widths(name: str, query: AnyArray, key: AnyArray) -> None:
    """Checks that vectors are of one width, for a score that compares coordinates.

    Raises ValueError where they are not.
    """
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{name} scores expect query and key of one head_dim, got {query.shape[-1]} and "
            f"{key.shape[-1]}; project them to one width or use the bilinear or additive score."
        )


def check_heads(qkv_features: int, num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError unless the width divides into heads and the query heads into groups."""
    if qkv_features % num_heads:
        raise ValueError(
            f"expected a width divisible by num_heads, got width {qkv_features} and {num_heads} "
            "heads; change one of them."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"expected num_heads to be a multiple of num_kv_heads, got {num_heads} and "
            f"{num_kv_heads}; change one of them."
        )


def check_no_identity(identity: bool | None) -> None:
    """Raises ValueError where the identity map is asked for between two sequences."""
    if identity:
        raise ValueError(
            "expected no identity map between two sequences, whose positions are not the same, got "
            "identity=True; leave it out."
        )


def check_temperature(temperature: float | str) -> None:
    """Raises ValueError unless the temperature is a positive number or "learned"."""
    if temperature != "learned" and (isinstance(temperature, str) or temperature <= 0):
        raise ValueError(
            f"expected a positive temperature or 'learned', got {temperature!r}; 1.0 leaves the "
            "scores alone."
        )
