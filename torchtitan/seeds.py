"""Seeds of random numbers that follow from names alone, and so are the same on every layout."""

from hashlib import blake2b


def seed_of(name: str, bits: int = 64) -> int:
    """A seed of so many bits for what is drawn under `name`."""
    return int.from_bytes(blake2b(name.encode(), digest_size=bits // 8).digest(), "little")
