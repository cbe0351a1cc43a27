"""Seeds of random numbers that depend on names alone, and so are the same on every layout."""

from hashlib import blake2b


def seed_of(name: str, bits: int = 64) -> int:
    """Return a seed of `bits` bits for the random numbers called `name`."""
    return int.from_bytes(blake2b(name.encode(), digest_size=bits // 8).digest(), "little")
