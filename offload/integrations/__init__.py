"""What other libraries need beside `OffloadZero`. The rest of this package imports none of it."""
