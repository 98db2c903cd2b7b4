"""Units in which sizes in bytes are printed and parsed."""

GIB = 1 << 30
