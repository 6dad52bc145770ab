"""A value that a test knows to be there."""


def present[Value](value: Value | None) -> Value:
    """Return the value; AssertionError without one."""
    assert value is not None
    return value
