"""Sizes in memory, as people read them."""


def format_bytes(number: int) -> str:
    """A number of bytes in the largest binary unit that leaves it at 1 or more.

    Example:
        >>> [format_bytes(n) for n in (12, 2_000, 3 * 2**20, 5 * 2**40)]
        ['12 B', '2.0 KiB', '3.0 MiB', '5120.0 GiB']
    """
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"
