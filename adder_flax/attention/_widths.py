"""The shape check that score functions share."""

from jaxtyping import Array


def require_equal_widths(name: str, query: Array, key: Array) -> None:
    """Raises ValueError where a score that compares coordinates gets vectors of different widths."""
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{name} scores expect query and key of one head_dim, got {query.shape[-1]} and {key.shape[-1]}; "
            "project them to one width or use the bilinear or additive score."
        )
